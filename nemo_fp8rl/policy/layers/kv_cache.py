"""The trainer's side of an FP8 KV cache: calibrates scales and rounds keys and values as the engine's cache does.

The attention of all layers shares one object. Scales belong to a version of the weights: they are calibrated on that
version, travel with its refit, and stay until the next, so that the trainer's log-probs of a rollout use the cache
values that the rollout used.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.fp8 import CacheRounding, KvMaxima, KvScales, cast_through_cache
from nemo_fp8rl.fp8.kv_cache_cast import SMALLEST_NORMAL
from nemo_fp8rl.ops.alignment import choose_alignment
from nemo_fp8rl.policy.on_cpu.vllm_cpu_rounding import cache_rounding, loses_denormals

FILE = "kv_scales.json"


class TrainerKvCache:
    """The scales of all layers, and the rounding that attention applies with them.

    num_layers:       layers of the whole model
    rounding:         None if the trainer does not round keys and values (`nemo_fp8rl.kv: rollout`)
    loses_denormals:  see `vllm_cpu_rounding.loses_denormals`
    is_current:       True if the scales belong to the present weights; code that moves the weights sets it to False
    """

    def __init__(self, num_layers: int, rounding: CacheRounding | None, loses_denormals: bool = False) -> None:
        self.num_layers, self.rounding, self.loses_denormals = num_layers, rounding, loses_denormals
        self.scales: KvScales | None = None
        self.is_current = False
        self._maxima: KvMaxima | None = None
        self._lengths = torch.empty(0)

    def read(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values that attention must use, in their dtype; during calibration, record the inputs.

        layer:  number of the layer, from 0
        query:  [s, b, heads, d], after RoPE
        key:    [s, b, groups, d], after RoPE; value has the same shape
        rows:   int64 [b], the numbers of these sequences in the microbatch; None for all sequences
        """
        scales = self.observe(layer, query, key, value, rows)
        if scales is not None and self.rounding is not None:
            key, value = (self._round(x, scale, self.rounding) for x, scale in zip((key, value), scales, strict=True))
        return key, value

    def observe(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: Tensor | None = None
    ) -> tuple[float, float] | None:
        """Return the scales (k, v) by which attention must round; None for none. During calibration, record the inputs.

        The arguments are those of `read`.
        """
        if self._maxima is not None:
            lengths = self._lengths if rows is None else self._lengths[rows]
            real = torch.arange(key.size(0), device=key.device)[:, None] < lengths
            self._maxima.observe(layer, q=query[real], k=key[real], v=value[real])
            return None
        if self.scales is None or self.rounding is None:
            return None
        return self.scales.k_scale[layer], self.scales.v_scale[layer]

    def _round(self, x: Tensor, scale: float, rounding: CacheRounding) -> Tensor:
        rounded = cast_through_cache(x, scale, rounding)
        if not self.loses_denormals:
            return rounded
        return rounded - torch.where(rounded.abs() < SMALLEST_NORMAL * scale, rounded, 0.0).detach()

    def smallest_sum(self, layer: int) -> float | None:
        """Return the bound below which a sum of the layer's values becomes 0; None if there is none."""
        if self._maxima is not None or self.scales is None or self.rounding is None or not self.loses_denormals:
            return None
        return SMALLEST_NORMAL * self.scales.v_scale[layer]

    @contextmanager
    def without_rounding(self) -> Iterator[None]:
        """Make `read` return its inputs unchanged inside the block."""
        scales, self.scales = self.scales, None
        try:
            yield
        finally:
            self.scales = scales

    def begin_calibration(self) -> None:
        """Make `read` record its inputs, without rounding, until `end_calibration`."""
        self._maxima = KvMaxima(self.num_layers)

    def set_lengths(self, lengths: Tensor) -> None:
        """Set the lengths of the next forward's sequences without padding, int64 [b]."""
        self._lengths = lengths

    def end_calibration(self) -> None:
        """Compute the scales from the recorded inputs of all ranks."""
        assert self._maxima is not None
        self._maxima.all_reduce()
        self.scales, self._maxima = self._maxima.scales(), None
        self.is_current = True

    def save(self, folder: Path) -> None:
        """Write the scales, if there are any. Raises OSError."""
        if self.scales is not None:
            (folder / FILE).write_text(json.dumps(asdict(self.scales)) + "\n")

    def load(self, folder: Path) -> None:
        """Read the scales that `save` wrote. Raises UserError, as a resumed run needs those of its last version."""
        try:
            raw = json.loads((folder / FILE).read_text())
            k, v, q = (tuple(map(float, raw[f"{x}_scale"])) for x in "kvq")
        except KeyError as name:
            weights = folder / "weights"
            hint = f"; start a new run with policy.model_name={weights}" if weights.is_dir() else ""
            raise UserError(
                f"{folder / FILE} lacks {name}: the checkpoint is not complete, or of an earlier release{hint}"
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{folder / FILE} cannot be read ({error}); the checkpoint is not complete") from None
        if not all(0 < scale < math.inf for scale in (*k, *v, *q)):
            raise UserError(f"{folder / FILE} has a scale that is not a finite number above 0")
        if {len(k), len(v), len(q)} != {self.num_layers}:
            raise UserError(f"{folder / FILE} has scales of another number of layers than {self.num_layers}")
        self.scales, self.is_current = KvScales(k, v, q), True


def make_kv_cache(num_layers: int, cfg: Config) -> TrainerKvCache | None:
    """Return the trainer's side of the recipe's FP8 KV cache, without scales; None where the recipe has none.

    num_layers:  layers of the whole model
    """
    if not cfg.fp8_kv_cache:
        return None
    is_unified, is_shared = cfg.nemo_fp8rl.kv == "unified", choose_alignment(cfg.nemo_fp8rl) == "shared_ops"
    rounding: CacheRounding = "nearest" if is_shared else cache_rounding()  # `ops.kv_pages`
    loses = not is_shared and loses_denormals(torch.bfloat16)  # `config.validate` demands this precision
    return TrainerKvCache(num_layers, rounding if is_unified else None, loses)
