"""A process with a GPU of its own: for `Ranks`, which calls it before anything there imports torch."""

import os

FAKE = "NEMO_FP8RL_TESTS_FAKE_CUDA"
"""Set where the plugin is, and so in the processes it starts."""


def own_gpu(rank: int) -> None:
    """One of this machine's, or a fake one with Transformer Engine's Python on fake kernels."""
    if FAKE not in os.environ:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank] if visible else str(rank)
        return
    from tests.fake_cuda.device import install

    install()
    from tests.transformer_engine import fake_kernels

    assert fake_kernels.install()
    fake_kernels.permute_by_torch()
    from nemo_fp8rl.policy import worker

    worker._check_gpu_policy = lambda *_: None  # experts in float32 are refused for TF32, which nothing here has
