"""Recipes of NeMo RL, read and checked without importing NeMo RL."""
