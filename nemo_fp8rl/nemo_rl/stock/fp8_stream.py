"""The trainer's half: what a NeMo RL worker streams to engines, quantized by the contract on its way out.

What the worker holds in FP8 alone (`fp8_param`) it streams as it is, with its scales, and so do we.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from nemo_fp8rl.fp8 import Fp8Layers, NonFiniteError, ScaleFormat, quantize_blockwise, scale_name
from nemo_fp8rl.fp8.format import E4M3, are_powers_of_two, count_nans, describe_non_finite, is_finite
from nemo_fp8rl.nemo_rl.recipe.precision import SCALES
from nemo_fp8rl.nemo_rl.stock.layer_agreement import is_kv_scale

CHOICE = "fp8_stream"
"""Key of the policy block, set by `choose`: what is FP8 on the wire; no list in a list, which NeMo RL cannot log."""


class Fp8Stream:
    """Mix in before a worker with `_iter_params_with_optional_kv_scales` (nemo_rl's megatron_policy_worker.py).

    It gives whole tensors by HF name, gathered over TP and EP; blocks of 128 do not straddle ranks, so their bytes are
    those of a quantized shard. `prepare_refit_info` reads shapes and dtypes from the same method. The scales of an FP8
    KV cache come after the weights; NeMo RL's worker puts 1 where it was given none.
    """

    cfg: Mapping[str, Any]
    _is_fp8_export: Callable[[], bool]
    _build_refit_conversion_tasks: Callable[[], list[Any]]
    kv_scale_names: Sequence[str] = ()

    def prepare_refit_info(self) -> Any:
        """NeMo RL's info as it is; the scales of an FP8 KV cache that it has are asked for from here on."""
        self.kv_scale_names = ()
        info = super().prepare_refit_info()  # type: ignore[misc]
        self.kv_scale_names = [name for name in info if is_kv_scale(name)]
        return info

    def _iter_params_with_optional_kv_scales(
        self, kv_scales: dict[str, float] | None = None, **kwargs: Any
    ) -> Iterator[tuple[str, Tensor]]:
        """(HF name, tensor): float8_e4m3fn and, as `..._scale_inv`, float32 [rows/128, columns/128] where FP8 is.

        Raises NonFiniteError, with the name, on a weight that holds NaN or infinity, and RuntimeError on a scale of the
        KV cache that no calibration of these weights gave, and where the worker holds FP8 with scales of another format
        than the recipe's.
        """
        for name in self.kv_scale_names:
            _check_kv_scale(name, (kv_scales or {}).get(name))
        if self._is_fp8_export() and kwargs.get("conversion_tasks") is None:
            # those of the set-up have copies of scales that Transformer Engine pads: of the first weights, for ever
            kwargs["conversion_tasks"] = self._build_refit_conversion_tasks()
        stream = super()._iter_params_with_optional_kv_scales(kv_scales=kv_scales, **kwargs)  # type: ignore[misc]
        if (choice := self.cfg.get(CHOICE)) is None:
            yield from stream
            return
        chosen = choice["fp8_layers"]
        layers = Fp8Layers(chosen["first"], chosen["end"], tuple(chosen["ignored"]))
        for name, tensor in stream:
            if tensor.dtype is E4M3 or name.endswith(scale_name("")):
                _check_held(name, tensor, choice["scale_format"])
                yield name, tensor
            elif layers.quantizes(name):
                yield from _quantized(name, tensor, choice["scale_format"])
            elif is_finite(tensor):
                yield name, tensor
            else:
                raise NonFiniteError(f"{name}: {describe_non_finite(tensor)}")


def _quantized(name: str, weight: Tensor, scale_format: ScaleFormat) -> Iterator[tuple[str, Tensor]]:
    try:
        quantized = quantize_blockwise(weight, scale_format=scale_format)
    except NonFiniteError as error:
        raise NonFiniteError(f"{name}: {error}") from None
    yield name, quantized.data
    yield scale_name(name), quantized.scale_inv


def _check_held(name: str, tensor: Tensor, scale_format: ScaleFormat) -> None:
    """tensor: E4M3 weights, or float32 scales, as the worker holds them."""
    if tensor.dtype is E4M3:
        if count := int(count_nans(tensor)):
            raise NonFiniteError(f"{name}: {count} of {tensor.numel()} FP8 values are NaN")
    elif not tensor.isfinite().all():
        raise NonFiniteError(f"{name}: {describe_non_finite(tensor)}")
    elif scale_format == "pow2" and not are_powers_of_two(tensor):
        raise RuntimeError(
            f"{name}: the trainer's scales are no powers of two, as the recipe's are: set {SCALES}='0', and leave the "
            "variable out of the environment"
        )


def _check_kv_scale(name: str, scale: float | None) -> None:
    if scale is None:
        raise RuntimeError(f"{name}: this refit came without it, and NeMo RL would take 1: it was not calibrated")
    if not 0 < scale < math.inf:
        raise RuntimeError(
            f"{name}={scale}, which no cache can have: its calibration saw no data, or numbers not finite"
        )
