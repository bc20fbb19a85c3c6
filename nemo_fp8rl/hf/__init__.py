"""HF checkpoint folders: the architecture in config.json, the tensors it implies, reading them. Knows no trainer."""
