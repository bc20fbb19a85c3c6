"""The driver's side of a refit: the links of the engines, which engine gives what to which, full or delta."""
