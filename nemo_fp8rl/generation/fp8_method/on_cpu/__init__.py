"""The layers of the quantization method on a CPU: FP8 matmuls, experts and caches, emulated."""
