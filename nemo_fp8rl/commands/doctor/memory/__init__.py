"""Memory of a GPU in each phase of a run, from sizes alone."""
