"""The tensors that a refit must send, computed at once from a rank's weights, for comparison with those of engines."""

from torch import Tensor

from nemo_fp8rl.policy.rank.worker import MegatronWorker
from nemo_fp8rl.refit.sender.checkpoint_form import to_checkpoint_form


def sent_tensors(worker: MegatronWorker) -> dict[str, Tensor]:
    """Return the tensors that a refit sends for the present weights of a single rank, by HF name."""
    choice, layers, encodes = worker.cfg.nemo_fp8rl, worker.engine_fp8_layers, worker.global_scales.encodes()
    sent: dict[str, Tensor] = {}
    for name, weight in worker.weights().for_checkpoint():
        sent |= to_checkpoint_form(name, weight, layers, choice.scale_format, choice.format, encodes.get(name))
    return sent | dict(worker.kv_cache.scales.named_tensors() if worker.kv_cache is not None else ())
