"""The trainer's side of an FP8 KV cache: calibrated scales, and attention that reads what the engine's cache holds.

One object is shared by the attention of all layers. Scales belong to a version of the weights: they are calibrated on
that version, travel with its refit, and stay until the next, so that the trainer's log-probs of a rollout see the
cache that the rollout saw.
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
from nemo_fp8rl.fp8 import CacheRounding, KvMaxima, KvScales, cast_through_cache
from nemo_fp8rl.fp8.kv_cache_cast import SMALLEST_NORMAL

FILE = "kv_scales.json"


class TrainerKvCache:
    """rounding: None where the trainer keeps its keys and values as they are (`nemo_fp8rl.kv: rollout`).

    loses_denormals: see `rounding.loses_denormals`. of_present_weights: whether the scales are; who moves the weights
    says that they are not.
    """

    def __init__(self, num_layers: int, rounding: CacheRounding | None, loses_denormals: bool = False) -> None:
        self.num_layers, self.rounding, self.loses_denormals = num_layers, rounding, loses_denormals
        self.scales: KvScales | None = None
        self.of_present_weights = False
        self._maxima: KvMaxima | None = None
        self._lengths = torch.empty(0)

    def read(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, counted from 0, as attention is to use them, in their own dtype.

        query [s, b, heads, d] and key [s, b, groups, d] after RoPE, value as key. rows: int64 [b], which sequences of
        the microbatch; None: all of them.
        """
        if self._maxima is not None:
            lengths = self._lengths if rows is None else self._lengths[rows]
            real = torch.arange(key.size(0), device=key.device)[:, None] < lengths
            self._maxima.observe(layer, q=query[real], k=key[real], v=value[real])
        elif self.scales is not None and self.rounding is not None:
            key = self._cached(key, self.scales.k_scale[layer], self.rounding)
            value = self._cached(value, self.scales.v_scale[layer], self.rounding)
        return key, value

    def _cached(self, x: Tensor, scale: float, rounding: CacheRounding) -> Tensor:
        held = cast_through_cache(x, scale, rounding)
        if not self.loses_denormals:
            return held
        return held - torch.where(held.abs() < SMALLEST_NORMAL * scale, held, 0.0).detach()

    def smallest_sum(self, layer: int) -> float | None:
        """Below it a sum of the layer's values is lost; None where none is."""
        if self._maxima is not None or self.scales is None or self.rounding is None or not self.loses_denormals:
            return None
        return SMALLEST_NORMAL * self.scales.v_scale[layer]

    @contextmanager
    def unread(self) -> Iterator[None]:
        """Inside, `read` rounds nothing."""
        scales, self.scales = self.scales, None
        try:
            yield
        finally:
            self.scales = scales

    def begin_calibration(self) -> None:
        """Have `read` count from here on, and round nothing."""
        self._maxima = KvMaxima(self.num_layers)

    def next_rows(self, lengths: Tensor) -> None:
        """int64 [b]: how much of the sequences of the next forward is not padding."""
        self._lengths = lengths

    def end_calibration(self) -> None:
        """Scales from what all ranks have seen."""
        assert self._maxima is not None
        self._maxima.all_reduce()
        self.scales, self._maxima = self._maxima.scales(), None
        self.of_present_weights = True

    def save(self, folder: Path) -> None:
        """Write the scales, when there are any. Raises OSError."""
        if self.scales is not None:
            (folder / FILE).write_text(json.dumps(asdict(self.scales)) + "\n")

    def load(self, folder: Path) -> None:
        """Raises UserError: a run that goes on needs the scales of its last version."""
        try:
            raw = json.loads((folder / FILE).read_text())
            k, v, q = (tuple(map(float, raw[f"{x}_scale"])) for x in "kvq")
        except KeyError as name:
            raise UserError(
                f"{folder / FILE} lacks {name}: the checkpoint is not complete, or of an earlier release; start a "
                f"new run with policy.model_name={folder}/weights"
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{folder / FILE} cannot be read ({error}); the checkpoint is not complete") from None
        if not all(0 < scale < math.inf for scale in (*k, *v, *q)):
            raise UserError(f"{folder / FILE} has a scale that is not a finite number above 0")
        if {len(k), len(v), len(q)} != {self.num_layers}:
            raise UserError(f"{folder / FILE} has scales of another number of layers than {self.num_layers}")
        self.scales, self.of_present_weights = KvScales(k, v, q), True
