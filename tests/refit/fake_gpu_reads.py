"""A fake of a GPU's slow reads: a refit in host memory defers its checks as on a GPU."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_fp8rl.refit import deferred_checks, message
from nemo_fp8rl.refit.digest import word_sum_digest
from nemo_fp8rl.refit.sender import push, weight_sender


def fake_gpu_reads(monkeypatch: Any) -> None:
    """Use digests of words, and read numbers at the end of a message, for tensors in host memory."""
    monkeypatch.setattr(message, "digest_of", word_sum_digest)
    for module in (deferred_checks, push, weight_sender):
        monkeypatch.setattr(module, "on_gpu", lambda tensor: True)


class ScalarReads(TorchDispatchMode):
    """Counts how often this thread reads a number out of a tensor."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))
