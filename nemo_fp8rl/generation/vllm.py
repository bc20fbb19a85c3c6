"""The driver's side of generation: vLLM engines that share the prompts, in this process or as Ray actors."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from nemo_fp8rl.batch import Completion
from nemo_fp8rl.config import Config
from nemo_fp8rl.generation.base import Sampling
from nemo_fp8rl.generation.engine import VllmEngine
from nemo_fp8rl.refit.bridge import Acknowledgement
from nemo_fp8rl.workers import ended_on_error, start_workers


class VllmGeneration:
    """`generation.base.Generation` over cluster.generation_engines engines."""

    def __init__(self, cfg: Config) -> None:
        self.engines = start_workers(VllmEngine, cfg.cluster.generation_engines, cfg.cluster)
        with ended_on_error(self.engines):
            self.engines.call("setup", [(cfg,)] * self.engines.count)

    def generate(
        self, prompts: Sequence[tuple[int, ...]], seeds: Sequence[int], sampling: Sampling
    ) -> list[list[Completion]]:
        """Contiguous parts of the prompts go to the engines; a prompt's seed makes its samples independent of which."""
        count = self.engines.count
        borders = [len(prompts) * i // count for i in range(count + 1)]
        parts = [(prompts[a:b], seeds[a:b], sampling) for a, b in pairwise(borders)]
        return [group for part in self.engines.call("generate", parts) for group in part]

    def load_update(self, handles: Sequence[Any]) -> list[Acknowledgement]:
        return self.engines.call("load_update", [tuple(handles)] * self.engines.count)

    def shutdown(self) -> None:
        self.engines.shutdown()
