"""NeMo RL's own loop, run with the package's parts."""
