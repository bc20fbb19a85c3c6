"""The trainer's half of FP8 on the wire: quantize the weights that a NeMo RL worker streams to the engines.

Weights are quantized by the contract of docs/numerics.md. With `fp8_param` the worker stores weights in FP8 alone and
streams these bytes and their scales; they are checked and passed on unchanged.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from nemo_fp8rl.fp8 import Fp8Layers, NonFiniteError, ScaleFormat, quantize_blockwise, scale_name
from nemo_fp8rl.fp8.block_scaled import E4M3, are_powers_of_two, count_nans, describe_non_finite, is_finite
from nemo_fp8rl.nemo_rl.recipe.precision import SCALES_KEY
from nemo_fp8rl.nemo_rl.stock.layer_agreement import is_kv_scale

STREAM_KEY = "fp8_stream"
"""Key of the policy block, set by `choose_workers`: which layers are FP8 on the wire.

Its value holds no list within a list, because NeMo RL cannot log that.
"""


class Fp8Stream:
    """Mixin that precedes a worker with `_iter_params_with_optional_kv_scales` (nemo_rl's megatron_policy_worker.py).

    The worker yields whole tensors by HF name, gathered over TP and EP. Blocks of 128 do not straddle ranks, so the
    quantized bytes equal those of a quantized shard. `prepare_refit_info` reads shapes and dtypes from the same method.
    The scales of an FP8 KV cache follow the weights; NeMo RL's worker sends 1 for a scale that it was not given.
    """

    cfg: Mapping[str, Any]
    _is_fp8_export: Callable[[], bool]
    _build_refit_conversion_tasks: Callable[[], list[Any]]
    kv_scale_names: Sequence[str] = ()

    def prepare_refit_info(self, *args: Any, **kwargs: Any) -> Any:
        """Return NeMo RL's info unchanged; every later refit must then bring the KV scales that the info names."""
        self.kv_scale_names = ()
        info = super().prepare_refit_info(*args, **kwargs)  # type: ignore[misc]
        self.kv_scale_names = [name for name in info if is_kv_scale(name)]
        return info

    def _iter_params_with_optional_kv_scales(
        self, kv_scales: dict[str, float] | None = None, **kwargs: Any
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, tensor); an FP8 weight is float8_e4m3fn, its scales `..._scale_inv` float32 [N/128, K/128].

        Raises: NonFiniteError, with the name, if a weight holds NaN or infinity; RuntimeError if a scale of the KV
            cache was not calibrated on these weights, or if the worker's FP8 scales have another format than the recipe
        """
        for name in self.kv_scale_names:
            _check_kv_scale(name, (kv_scales or {}).get(name))
        if self._is_fp8_export() and kwargs.get("conversion_tasks") is None:
            # The tasks of the setup keep copies of the scales that Transformer Engine pads: those of the first weights.
            kwargs["conversion_tasks"] = self._build_refit_conversion_tasks()
        stream = super()._iter_params_with_optional_kv_scales(kv_scales=kv_scales, **kwargs)  # type: ignore[misc]
        if (choice := self.cfg.get(STREAM_KEY)) is None:
            yield from stream
            return
        chosen_layers = choice["fp8_layers"]
        layers = Fp8Layers(chosen_layers["first"], chosen_layers["end"], tuple(chosen_layers["ignored"]))
        for name, tensor in stream:
            if tensor.dtype is E4M3 or name.endswith(scale_name("")):
                _check_fp8_export(name, tensor, choice["scale_format"])
                yield name, tensor
            elif layers.quantizes(name):
                yield from _quantize(name, tensor, choice["scale_format"])
            elif is_finite(tensor):
                yield name, tensor
            else:
                raise NonFiniteError(f"{name}: {describe_non_finite(tensor)}")


def _quantize(name: str, weight: Tensor, scale_format: ScaleFormat) -> Iterator[tuple[str, Tensor]]:
    try:
        quantized = quantize_blockwise(weight, scale_format=scale_format)
    except NonFiniteError as error:
        raise NonFiniteError(f"{name}: {error}") from None
    yield name, quantized.data
    yield scale_name(name), quantized.scale_inv


def _check_fp8_export(name: str, tensor: Tensor, scale_format: ScaleFormat) -> None:
    """Check E4M3 weights or float32 scales that the worker stores in FP8 alone."""
    if tensor.dtype is E4M3:
        if count := int(count_nans(tensor)):
            raise NonFiniteError(f"{name}: {count} of {tensor.numel()} FP8 values are NaN")
    elif not tensor.isfinite().all():
        raise NonFiniteError(f"{name}: {describe_non_finite(tensor)}")
    elif scale_format == "pow2" and not are_powers_of_two(tensor):
        raise RuntimeError(
            f"{name}: the trainer's scales are no powers of two, as the recipe's are: set {SCALES_KEY}='0', and leave "
            "the variable out of the environment"
        )


def _check_kv_scale(name: str, scale: float | None) -> None:
    if scale is None:
        raise RuntimeError(f"{name}: this refit came without it, and NeMo RL would take 1: it was not calibrated")
    if not 0 < scale < math.inf:
        raise RuntimeError(
            f"{name}={scale} is no valid scale of a KV cache: its calibration saw no data, or values not finite"
        )
