"""The quantization method on a CPU: emulated FP8 matmuls, experts and caches."""
