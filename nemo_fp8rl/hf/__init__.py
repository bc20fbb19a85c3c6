"""HF checkpoint folders: the architecture in config.json, its tensors, reading and writing them. Without a trainer."""
