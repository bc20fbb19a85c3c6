"""The lengths of prompts that attention reads with a window, for every sequence of a batch."""

from typing import Any

import torch


class PromptLengths:
    """A mixin before a metadata builder of vLLM: with a window it is given the length of every sequence's prompt.

    The newer model runner of vLLM 0.32 gives none while it captures CUDA graphs, which would then have no window, and
    none for the sequences that fill a graph's batch up, on which the builder would fail (v1/worker/gpu/input_batch.py,
    make_dummy; model_runner.py, prepare_inputs). 1 stands for those: a dummy sequence sees a key in any case.
    """

    has_window: bool

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self.has_window = getattr(vllm_config.model_config, "rswa_window", None) is not None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Return vLLM's metadata of a batch."""
        common = common_attn_metadata
        if self.has_window:
            lengths, given = torch.ones_like(common.seq_lens[: common.num_reqs]), common.rswa_prefix_lens
            if given is not None:
                given = given[: len(lengths)]
                lengths[: len(given)].copy_(given.clamp(min=1))
            common = common.replace(rswa_prefix_lens=lengths)
        return super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
