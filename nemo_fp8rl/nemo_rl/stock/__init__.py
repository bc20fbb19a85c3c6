"""FP8 on the wire between NeMo RL's own Megatron worker and its own vLLM worker, without a patch of either.

    trainer   `stream` quantizes what the worker streams, once      Policy(worker_extension_cls_fqn=...)
    wire      NeMo RL's: CUDA IPC handles, or NCCL broadcasts       half of the bytes
    engine    `engine` loads FP8 as it comes, layer by layer        generation.vllm_kwargs.worker_cls

`choose` says both in a recipe's own keys, `agreement` holds them against each other before a refit, and `pythonpath`
lets workers import them. It needs NeMo RL's GPU environment; docs/nemo_rl.md has what was run without.
"""
