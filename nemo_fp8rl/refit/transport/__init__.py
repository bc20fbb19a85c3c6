"""The transports that move a bucket from a trainer rank to an engine rank; `link` defines their common interface."""
