"""What a model is made of: its layers by kind, their weights, and what a token or a sequence of it keeps in memory."""
