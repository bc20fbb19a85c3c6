"""Small helpers that every room may use: files, screen, machine, regions of tensors. They import no room."""
