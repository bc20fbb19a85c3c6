"""A KV cache that keeps the prompt and a window of generated tokens: `policy.generation.vllm_cfg.kv_window`.

vLLM calls this a reference sliding window. It reads the window from the model's config, where `engine_arguments` puts
it. The engine's core frees the blocks between prompt and window (`spec`), and attention does not see them: on a CPU
`on_cpu`, on a GPU vLLM's own kernels (`on_gpu`), or those that trainer and engine share (`shared_ops`).
"""
