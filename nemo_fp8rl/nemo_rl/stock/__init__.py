"""FP8 on the wire between NeMo RL's own Megatron worker and its own vLLM worker, without a patch of either.

    trainer   `fp8_stream` quantizes what the worker streams, once    Policy(worker_extension_cls_fqn=...)
    wire      NeMo RL's: CUDA IPC handles, or NCCL broadcasts         half of the bytes
    engine    `vllm_worker` loads FP8 as it comes, layer by layer     generation.vllm_kwargs.worker_cls

`worker_choice` writes both classes into the recipe's own keys. `layer_agreement` compares trainer and engine before a
refit. `pythonpath` lets the workers import these modules. The folder needs NeMo RL's GPU environment; docs/nemo_rl.md
says what was run without it.
"""
