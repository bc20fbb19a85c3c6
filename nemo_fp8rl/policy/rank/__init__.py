"""One rank of the trainer: its worker, its pass over a batch, its process groups and what it can offload."""
