"""What the driver of a refit knows: the links of the engines, which engine gives what to which, full or delta."""
