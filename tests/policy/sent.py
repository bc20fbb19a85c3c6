"""What a refit must bring, made of a rank's weights in one go: to hold against what engines have."""

from torch import Tensor

from nemo_fp8rl.policy.worker import MegatronWorker
from nemo_fp8rl.refit.checkpoint_form import to_checkpoint_form


def sent_tensors(worker: MegatronWorker) -> dict[str, Tensor]:
    """What a refit brings of the weights that this one rank holds now, by HF name."""
    scale_format, layers = worker.cfg.nemo_fp8rl.scale_format, worker.engine_fp8_layers
    sent: dict[str, Tensor] = {}
    for name, weight in worker.weights().for_checkpoint():
        sent |= to_checkpoint_form(name, weight, layers, scale_format)
    return sent | dict(worker.kv_cache.scales.named_tensors() if worker.kv_cache is not None else ())
