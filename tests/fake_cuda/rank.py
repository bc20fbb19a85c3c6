"""The initializer of a process with its own GPU; `Ranks` calls it before the process imports torch."""

import os

FAKE = "NEMO_FP8RL_TESTS_FAKE_CUDA"
"""The plugin sets this variable, so the processes that it starts have it."""


def own_gpu(rank: int) -> None:
    """Use a GPU of this machine, or a fake GPU with Transformer Engine's Python on fake kernels."""
    if FAKE not in os.environ:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank] if visible else str(rank)
        return
    from tests.fake_cuda.device import install

    install()
    from tests.interpreted_triton import lengthen_steps
    from tests.transformer_engine import fake_kernels

    assert fake_kernels.install()
    lengthen_steps()
    fake_kernels.permute_by_torch()
    from nemo_fp8rl.policy.rank import worker

    worker.check_gpu_policy = lambda *_: None  # experts in float32 are refused for TF32, which nothing here has
