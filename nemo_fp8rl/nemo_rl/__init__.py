"""The add-on for NeMo RL: its recipes, read and checked without importing it, and adapters for its interfaces."""
