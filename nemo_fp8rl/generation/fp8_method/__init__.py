"""The quantization method `nemo_fp8rl` of vLLM: its plugin, its layers, and their kernels by device."""
