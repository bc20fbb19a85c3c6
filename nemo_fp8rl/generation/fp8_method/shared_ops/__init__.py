"""Shared operations (`nemo_fp8rl.ops`) in the place of vLLM's, in engines whose recipe is aligned on a GPU.

vLLM takes them by its public ways: `register_oot` for norms, rotation, activation and sums over ranks,
`register_backend` for attention, and our quantization method for matrix products. The choice is made for each engine:
it travels in the model's quantization_config, and a layer asks for it while vLLM builds the model. Another engine in
the same process keeps vLLM's own operations.
"""
