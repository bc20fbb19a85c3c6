"""HF checkpoint folders: the architecture in config.json, its tensors, reading and writing them. Knows no trainer."""
