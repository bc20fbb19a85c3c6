"""MXFP8 and NVFP4 of an engine on a GPU; `gpu_linear` and `gpu_experts` have FP8.

Every kernel multiplies the values that the trainer's emulated layers multiply, and sums in float32 in an order of its
own. Blackwell has matmuls of both formats (`blackwell_linear`). Everywhere else, and for all experts, vLLM's Marlin
kernels dequantize weights to bfloat16, which is exact (`marlin_linear`, `marlin_experts`); activations are quantized
and dequantized before, which is exact as well, unless the format leaves them alone (W4A16).

Kernels read weights or scales in layouts of their own. Those copies are derived from the stored parameters after every
refit, into the same memory, because CUDA graphs keep its address.
"""
