"""The engine's side of a refit: each rank reads every piece of a version exactly once."""
