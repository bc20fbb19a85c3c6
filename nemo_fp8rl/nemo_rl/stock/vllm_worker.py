"""The engine's half: a vLLM worker that loads FP8 as it comes. Named by `policy.generation.vllm_kwargs.worker_cls`."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache

from nemo_fp8rl.generation.fp8_method.fp8_caches import fp8_caches
from nemo_fp8rl.generation.vllm_compat import forget_packed_experts, preserve_nonpersistent_buffers, set_kv_scales
from nemo_fp8rl.nemo_rl.stock.layer_agreement import BFLOAT16, disagreement, is_kv_scale

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker  # type: ignore[assignment]


REPLACED = ("_load_weights", "_weight_update_lifecycle")
"""Methods of NeMo RL's extension."""


class Fp8Worker(Worker):
    """vLLM's, of this platform. Once the model is there, this object's refits are `_Reload`'s.

    It is on the object because vLLM refuses a worker class that has a name of the extension it mixes in. Raises
    RuntimeError where NeMo RL's extension lacks what is replaced, as its refits would pass ours by, and where CUDA
    graphs would keep the scales that an FP8 cache begins with.
    """

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        for name in REPLACED:
            if not hasattr(self, name):
                raise RuntimeError(
                    f"NeMo RL's extension of vLLM's worker has no {name}, so FP8 on the wire would be processed once "
                    "more: use its main of August 2026, or nemo_fp8rl.workers=ours"
                )
        super().load_model(*args, **kwargs)
        caches = fp8_caches(self.model_runner.get_model()).values()
        graphs = self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        if graphs and any(cache.attn_backend.get_name() == "FLASHINFER" for cache in caches):
            raise RuntimeError(
                "FlashInfer's attention on an FP8 KV cache, whose whole CUDA graphs keep the scales they were captured "
                "with: set policy.generation.vllm_cfg.enforce_eager=true, or in policy.generation.vllm_kwargs "
                "attention_backend=TRITON_ATTN or compilation_config.cudagraph_mode=PIECEWISE"
            )
        self.reload = _Reload(self)
        self.prepare_refit_info = self.reload.announced
        self._load_weights = self.reload.take
        self._weight_update_lifecycle = self.reload.lifecycle

    def wake_up(self, *args: Any, **kwargs: Any) -> None:
        """Wake up, and set the scales of an FP8 cache, for which vLLM then puts 1 (gpu_worker.py, 0.25)."""
        super().wake_up(*args, **kwargs)
        self.reload.set_kv_scales()


class _Reload:
    """vLLM's layerwise reload, fed by NeMo RL's batches, of all that its `state_dict_info` announced."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.missing: set[str] = set()
        self.kv_scales: dict[str, Tensor] = {}
        self.half_done = False

    def announced(self, state_dict_info: dict[str, Any]) -> None:
        """Called in place of NeMo RL's `prepare_refit_info`, which keeps what it is given. Raises RuntimeError where
        trainer and engine do not hold the same matrices in FP8, or an FP8 cache would stay without scales: here, as the
        driver hears of it; what is raised in a refit NeMo RL logs, and the trainer waits.
        """
        self.worker.state_dict_info = state_dict_info
        if (quantization := self.worker.vllm_config.quant_config) is None:  # of some families NeMo RL clears it
            raise RuntimeError(
                f"NeMo RL built this engine of {self.worker.model_config.model} without its quantization_config, and "
                f"the trainer streams FP8: {BFLOAT16}"
            )
        model, fused = self.worker.model_runner.get_model(), quantization.packed_modules_mapping
        drafter = getattr(getattr(self.worker.model_runner, "drafter", None), "model", None)
        refusal = disagreement(parameters(model), state_dict_info, fused) or without_kv_scales(model, state_dict_info)
        if not refusal and drafter is not None:
            refusal = without_kv_scales(drafter, ())
        if refusal:
            raise RuntimeError(refusal)

    @contextmanager
    def lifecycle(self, transport: str) -> Iterator[Callable[[], None]]:
        """A refit, in place of NeMo RL's lifecycle, which processes all loaded weights once more.

        Raises RuntimeError for a refit that ends early, and for any after it: the engine then has layers of two
        versions, which nothing but a new engine mends.
        """
        if self.half_done:
            raise RuntimeError(
                "the refit before this one failed, and this engine holds a mixture of weights: start it again"
            )
        model = self.worker.model_runner.get_model()
        self.half_done = True
        self.missing = set(self.worker.state_dict_info)

        def finalize() -> None:
            if self.missing:
                raise RuntimeError(f"the refit ended without {min(self.missing)}")
            finalize_layerwise_reload(model, self.worker.model_config)
            self.set_kv_scales()
            self.half_done = False

        forget_packed_experts(model)
        with set_current_vllm_config(self.worker.vllm_config), preserve_nonpersistent_buffers(model):
            initialize_layerwise_reload(model)
            yield finalize

    def take(self, weights: list[tuple[str, Tensor]]) -> None:
        """Load a batch; its memory is the sender's again afterwards, and a layer waits until it is whole: so copies.

        NeMo RL calls this on two CUDA streams in turn, so the copies are there when it returns.
        """
        self.missing -= {name for name, _ in weights}
        copies = {name: tensor.clone() for name, tensor in weights}
        for name in filter(is_kv_scale, list(copies)):
            self.kv_scales[name] = copies.pop(name)
        self.worker.model_runner.get_model().load_weights(weights=list(copies.items()))
        if current_platform.is_cuda():
            torch.cuda.current_stream().synchronize()

    def set_kv_scales(self) -> None:
        """Set the scales of the last refit, if there was one, in the engine's FP8 caches."""
        if self.kv_scales:
            for names, attention in fp8_caches(self.worker.model_runner.get_model()).items():
                set_kv_scales(attention, *(self.kv_scales[name].reshape(()) for name in names))


def without_kv_scales(model: torch.nn.Module, announced: Collection[str]) -> str:
    """An attention layer whose FP8 cache would stay without scales, in a sentence; empty if there is none."""
    served = {id(layer): names for names, layer in fp8_caches(model).items()}
    for path, layer in model.named_modules():
        if is_quantized_kv_cache(str(getattr(layer, "kv_cache_dtype", "auto"))):
            names = served.get(id(layer))
            if names is None or not set(names) <= set(announced):
                return (
                    f"the trainer announces no scales for the FP8 KV cache of {path}: set "
                    "policy.generation.vllm_cfg.kv_cache_dtype=auto"
                )
    return ""


def parameters(model: torch.nn.Module) -> Iterator[str]:
    """A model's parameters, by vLLM's names, as they are before vLLM processes what was loaded."""
    for path, layer in model.named_modules():
        yield from (f"{path}.{name}" for name in get_layerwise_info(layer).restore_metadata[0])
