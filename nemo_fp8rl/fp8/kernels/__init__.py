"""Implementations of the contract; `reference` is the specification, every other one must equal it to the bit."""
