"""A run on disk and its life: directory, resume, logs, samples, signals."""
