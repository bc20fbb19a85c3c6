"""Gradient buffers, the optimizer and the schedule of a rank."""
