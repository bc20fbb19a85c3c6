"""The training policy: Megatron Core, its FP8 layers, and what it exports for the refit."""
