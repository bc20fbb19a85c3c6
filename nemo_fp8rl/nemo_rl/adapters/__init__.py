"""The package's policy, engines, loss and refit behind NeMo RL's interfaces."""
