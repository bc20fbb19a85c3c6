"""The engine's end of a refit: one rank reads every piece of a version exactly once."""
