"""The engine's half of FP8 on the wire: a vLLM worker that loads FP8 tensors unchanged.

`policy.generation.vllm_kwargs.worker_cls` names its class.
"""

import asyncio
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
from nemo_fp8rl.nemo_rl.stock.layer_agreement import BFLOAT16, describe_disagreement, is_kv_scale

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker  # type: ignore[assignment]


REPLACED_METHODS = ("_load_weights", "_weight_update_lifecycle")
"""Methods of NeMo RL's worker extension that `Fp8Worker` replaces."""


class Fp8Worker(Worker):
    """vLLM's worker of this platform; once the model is loaded, `_Reload` handles its refits.

    The methods are replaced on the object, because vLLM refuses a worker class that shares a name with the extension it
    mixes in.
    Raises: RuntimeError in `load_model` if NeMo RL's extension lacks a method to replace, as its refits would then
        bypass `_Reload`, or if CUDA graphs would keep the initial scales of an FP8 cache
    """

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        for name in REPLACED_METHODS:
            if not hasattr(self, name):
                raise RuntimeError(
                    f"NeMo RL's extension of vLLM's worker has no {name}, so it would process FP8 weights once more "
                    "after a refit: use its main of August 2026, or nemo_fp8rl.workers=ours"
                )
        super().load_model(*args, **kwargs)
        caches = fp8_caches(self.model_runner.get_model()).values()
        graphs = self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        if graphs and any(cache.attn_backend.get_name() == "FLASHINFER" for cache in caches):
            raise RuntimeError(
                "FlashInfer's attention on an FP8 KV cache: its full CUDA graphs keep the scales they were captured "
                "with: set policy.generation.vllm_cfg.enforce_eager=true, or in policy.generation.vllm_kwargs "
                "attention_backend=TRITON_ATTN or compilation_config.cudagraph_mode=PIECEWISE"
            )
        self.reload = _Reload(self)
        self.prepare_refit_info = self.reload.set_refit_info
        self._load_weights = self.reload.load_batch
        self._weight_update_lifecycle = self.reload.lifecycle
        if hasattr(self, "update_weights_from_checkpoint_engine"):
            self.update_weights_from_checkpoint_engine = self.reload.load_from_checkpoint_engine

    def wake_up(self, *args: Any, **kwargs: Any) -> None:
        """Wake up and restore the scales of an FP8 cache, which vLLM resets to 1 (gpu_worker.py, 0.25)."""
        super().wake_up(*args, **kwargs)
        self.reload.set_kv_scales()


class _Reload:
    """vLLM's layerwise reload, fed by the batches of a NeMo RL refit, by whichever transport.

    missing:     names of NeMo RL's `state_dict_info` that this refit has not brought yet
    kv_scales:   scales of the last refit by name, for the FP8 KV cache
    is_partial:  a refit has begun and not ended, so the engine has layers of two versions
    """

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.missing: set[str] = set()
        self.kv_scales: dict[str, Tensor] = {}
        self.is_partial = False

    def set_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """Keep the names of coming refits, as NeMo RL's `prepare_refit_info` does, and check them.

        The check is here because the driver gets errors of this call. An error within a refit is only logged by NeMo
        RL, and the trainer waits on.
        Raises: RuntimeError if trainer and engine store different matrices in FP8, or if an FP8 cache would get no
            scales
        """
        self.worker.state_dict_info = state_dict_info
        if (quantization := self.worker.vllm_config.quant_config) is None:  # NeMo RL clears it for some families
            raise RuntimeError(
                f"NeMo RL built this engine of {self.worker.model_config.model} without its quantization_config, and "
                f"the trainer streams FP8: {BFLOAT16}"
            )
        model, fused = self.worker.model_runner.get_model(), quantization.packed_modules_mapping
        drafter = getattr(getattr(self.worker.model_runner, "drafter", None), "model", None)
        refusal = describe_disagreement(parameter_names(model), state_dict_info, fused)
        refusal = refusal or find_missing_kv_scales(model, state_dict_info)
        if not refusal and drafter is not None:
            refusal = find_missing_kv_scales(drafter, ())
        if refusal:
            raise RuntimeError(refusal)

    @contextmanager
    def lifecycle(self, transport: str) -> Iterator[Callable[[], None]]:
        """Run a refit, in place of NeMo RL's lifecycle, which processes all loaded weights once more.

        Raises: RuntimeError if the refit ends early, and in every later refit: the engine then has layers of two
            versions, and only a new engine mends that
        """
        if self.is_partial:
            raise RuntimeError(
                "the refit before this one failed, and this engine holds a mixture of weights: start it again"
            )
        model = self.worker.model_runner.get_model()
        self.is_partial = True
        self.missing = set(self.worker.state_dict_info)

        def finalize() -> None:
            if self.missing:
                raise RuntimeError(f"the refit ended without {min(self.missing)}")
            finalize_layerwise_reload(model, self.worker.model_config)
            self.set_kv_scales()
            self.is_partial = False

        forget_packed_experts(model)
        with set_current_vllm_config(self.worker.vllm_config), preserve_nonpersistent_buffers(model):
            initialize_layerwise_reload(model)
            yield finalize

    def load_from_checkpoint_engine(self) -> bool:
        """Load what NeMo RL's checkpoint engine brings, in place of NeMo RL's method, which knows no lifecycle.

        A refit begins with the first batch. So an engine that yields nothing before it has verified everything, as
        `refit_transport` does, leaves these weights as they are if its transfer fails.
        """
        return asyncio.run(self._load_from_checkpoint_engine())

    async def _load_from_checkpoint_engine(self) -> bool:
        batches = self.worker.checkpoint_engine.receive_weight_batches()
        first = await anext(batches, None)
        if first is None:
            raise RuntimeError("the checkpoint engine brought no weights")
        with self.lifecycle("checkpoint_engine") as finalize:
            self.load_batch(first)
            async for batch in batches:
                self.load_batch(batch)
            finalize()
        return True

    def load_batch(self, weights: list[tuple[str, Tensor]]) -> None:
        """Copy a batch and load it.

        Copies are needed because the sender reuses the memory, while a layer is loaded only when it is complete. NeMo
        RL calls this on two CUDA streams in turn, so the copies are complete when the call returns.
        """
        self.missing -= {name for name, _ in weights}
        copies = {name: tensor.clone() for name, tensor in weights}
        for name in filter(is_kv_scale, list(copies)):
            self.kv_scales[name] = copies.pop(name)
        self.worker.model_runner.get_model().load_weights(weights=list(copies.items()))
        if current_platform.is_cuda():
            torch.cuda.current_stream().synchronize()

    def set_kv_scales(self) -> None:
        """Set the scales of the last refit, if any, in the engine's FP8 caches."""
        if self.kv_scales:
            for names, attention in fp8_caches(self.worker.model_runner.get_model()).items():
                set_kv_scales(attention, *(self.kv_scales[name].reshape(()) for name in names))


def find_missing_kv_scales(model: torch.nn.Module, trainer_names: Collection[str]) -> str:
    """Return a sentence on an attention layer whose FP8 cache would get no scales; empty if there is none."""
    served = {id(layer): names for names, layer in fp8_caches(model).items()}
    for path, layer in model.named_modules():
        if is_quantized_kv_cache(str(getattr(layer, "kv_cache_dtype", "auto"))):
            names = served.get(id(layer))
            if names is None or not set(names) <= set(trainer_names):
                return (
                    f"the trainer announces no scales for the FP8 KV cache of {path}: set "
                    "policy.generation.vllm_cfg.kv_cache_dtype=auto"
                )
    return ""


def parameter_names(model: torch.nn.Module) -> Iterator[str]:
    """Yield vLLM's names of the model's parameters before vLLM processes the loaded weights."""
    for path, layer in model.named_modules():
        yield from (f"{path}.{name}" for name in get_layerwise_info(layer).restore_metadata[0])
