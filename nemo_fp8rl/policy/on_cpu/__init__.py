"""The policy on a CPU: Megatron without CUDA, and the sums and roundings of vLLM's CPU kernels."""
