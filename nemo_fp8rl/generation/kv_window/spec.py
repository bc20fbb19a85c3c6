"""The blocks that a windowed cache keeps, and how many a request took: vLLM's manager of such blocks, which counts.

The engine's core imports this module with the first spec that a worker sends it.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar
from weakref import WeakSet

from vllm.v1.core.single_type_kv_cache_manager import RSWAManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, RSWASpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

from nemo_fp8rl.generation.fp8_method.shared_ops.engine_choice import kv_window

KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # registers vLLM's specs, which a first registration would prevent


class WindowManager(RSWAManager):
    """Frees a request's blocks between prompt and window as vLLM does, and counts the blocks of each request.

    peak, kept, dense:  see `take_block_counts`
    """

    managers: ClassVar[WeakSet["WindowManager"]] = WeakSet()
    """Those of this process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.managers.add(self)
        self.gaps, self.peaks = dict[str, tuple[int, int]](), dict[str, int]()
        self.peak = self.kept = self.dense = 0

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        super().remove_skipped_blocks(request_id, processed_computed_tokens, num_prompt_tokens)
        if num_prompt_tokens is None:
            return
        blocks = self.req_to_blocks.get(request_id, ())
        first, end = self.gaps.get(request_id) or (2 * (-(-num_prompt_tokens // self.block_size),))
        while end < len(blocks) and blocks[end].is_null:
            end += 1
        self.gaps[request_id] = first, end

    def allocate_new_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> Any:
        new_blocks = super().allocate_new_blocks(request_id, *args, **kwargs)
        first, end = self.gaps.get(request_id, (0, 0))
        now = len(self.req_to_blocks[request_id]) - (end - first)
        self.peaks[request_id] = max(self.peaks.get(request_id, 0), now)
        return new_blocks

    def pop_blocks_for_free(self, request_id: str) -> Any:
        blocks, peak = super().pop_blocks_for_free(request_id), self.peaks.pop(request_id, 0)
        self.gaps.pop(request_id, None)
        self.peak, self.kept, self.dense = max(self.peak, peak), self.kept + peak, self.dense + len(blocks)
        return blocks


@register_kv_cache_spec(manager_class=WindowManager, uniform_type_base_spec=FullAttentionSpec)
@dataclass(frozen=True, kw_only=True)
class WindowSpec(RSWASpec):
    """vLLM's spec of a windowed cache, with `WindowManager`."""


def take_block_counts() -> tuple[int, int, int]:
    """Return (peak, kept, dense) of the requests that ended in this process's engines since the last call.

    A preempted request ends, and is counted again when it has been resumed.

    peak:   most blocks that a request had at a time
    kept:   the sum over requests of that number
    dense:  the sum over requests of the blocks that all their tokens take
    """
    counts = [(manager.peak, manager.kept, manager.dense) for manager in WindowManager.managers]
    for manager in WindowManager.managers:
        manager.peak = manager.kept = manager.dense = 0
    peaks, kept, dense = zip(*counts, strict=True) if counts else ((0,),) * 3
    return max(peaks), sum(kept), sum(dense)


class ModelInConstruction:
    """The model that vLLM builds in this process: its window, or None."""

    window: ClassVar[int | None] = None

    @classmethod
    def note(cls) -> None:
        """Note the window; attention layers call this as they are made.

        vLLM asks a backend for its specs as soon as the layers are there, but then no config is current.
        """
        cls.window = kv_window()


class WindowImplMixin:
    """A mixin before an attention layer of vLLM: it notes the window of its model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ModelInConstruction.note()


class WindowSpecMixin:
    """A mixin before a backend of vLLM with layers that are `WindowImplMixin`: it has the spec of a windowed cache."""

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return windowed(super().customize_spec(spec))  # type: ignore[misc]


def windowed(spec: Any) -> Any:
    """Return the spec of a windowed cache for one of full attention, if the model has a window; else `spec`."""
    window = ModelInConstruction.window
    if window is None or type(spec) is not FullAttentionSpec:
        return spec
    return WindowSpec(**{field.name: getattr(spec, field.name) for field in fields(spec)}, rswa_window=window)
