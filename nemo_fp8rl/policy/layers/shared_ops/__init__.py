"""Layers of the trainer that compute by the operations of `ops`, as an aligned engine on a GPU does."""
