"""Our vLLM engines behind NeMo RL's GenerationInterface."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.interfaces import GenerationInterface

from nemo_fp8rl.batch import Completion
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.generation.engine_pool import CALLS_AT_ONCE, EnginePool
from nemo_fp8rl.generation.interface import Sampling, sample_seed
from nemo_fp8rl.nemo_rl.adapters.batched_data import merge_repeats, to_generation_output, unpad_prompts
from nemo_fp8rl.nemo_rl.adapters.coalesce import Coalescer
from nemo_fp8rl.refit.bridge import RefitBridge

REMEMBERED = 1 << 18
"""Prompts, of which it is known how often they were asked."""


class VllmFp8Generation(GenerationInterface):
    """Seeds come from grpo.seed and the version of the weights, so that a resumed run samples what an uninterrupted
    one does: for `generate` from a prompt's place in the call and the turn of its conversation, for `generate_async`,
    where calls have no order, from the prompt and how often this version was asked it.

    A copy in another process (NeMo RL's collector of trajectories) generates with the same engines, if these are
    processes of their own. It replaces none, and takes what it is asked for as one version.

    bridge: set before the first generation. weight_synchronizer: NeMo RL refits through it, where it looks for one.
    """

    bridge: RefitBridge | None = None
    weight_synchronizer: Any = None

    def __init__(self, generation: EnginePool, cfg: Config, generation_cfg: Mapping[str, Any], pad: int) -> None:
        """generation_cfg: NeMo RL's `policy.generation`, which its loops read from here. pad: token id."""
        self.generation, self.config, self.cfg, self.pad_token_id = generation, cfg, generation_cfg, pad
        self.turn, self.answered = 0, set[tuple[int, ...]]()
        self.counts = generation.metrics()
        self._begin()

    def _begin(self) -> None:
        self.asked_before = OrderedDict[int, int]()  # by the row's hash
        self.counted = ""  # the step that these are of
        self.lock = Lock()
        self.ask = Coalescer(self._answer, CALLS_AT_ONCE)

    @property
    def step(self) -> str:
        """The step of the loop that the next answers belong to; in a copy, that in which it was made."""
        return self.origin if self.bridge is None else str(self.bridge.version + 1)

    def __getstate__(self) -> dict[str, Any]:
        own = ("bridge", "weight_synchronizer", "asked_before", "counted", "lock", "ask")
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        return state | {"origin": f"{self.step}, collected"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def generate(self, data: Mapping[str, Any], greedy: bool = False) -> Any:
        """NeMo RL's GenerationOutputSpec (`batches.to_generation_output`)."""
        rows = unpad_prompts(data["input_ids"], data["input_lengths"])
        asked, samples = merge_repeats(rows)
        self.turn = self.turn + 1 if self._continues(rows) else 0
        places: list[int | str] = [f"{i} of turn {self.turn}" if self.turn else i for i in range(len(asked))]
        # in a later call, too, as of a validation set that repeats its prompts
        before = self._occurrences(list(zip(places, asked, strict=True)))
        places = [f"{place} again {n}" if n else place for place, n in zip(places, before, strict=True)]
        completions = self._complete(asked, places, samples, self._stop_strings(data), greedy)
        self.answered = {row + completion.token_ids for row, completion in zip(rows, completions, strict=True)}
        return self._output(rows, completions, data["input_ids"].size(1))

    async def generate_async(self, data: Mapping[str, Any], greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
        """(row, its GenerationOutputSpec), of one or many rows; rows of other calls at the same time join in."""
        stop, width = self._stop_strings(data), data["input_ids"].size(1)
        rows = unpad_prompts(data["input_ids"], data["input_lengths"])
        answers = await asyncio.gather(*(self.ask((row, stop, greedy)) for row in rows))
        for i, completion in enumerate(answers):
            yield i, self._output(rows[i : i + 1], [completion], width)

    def _answer(
        self, asked: Sequence[tuple[tuple[int, ...], frozenset[str], bool]]
    ) -> Iterator[tuple[int, Completion]]:
        for stop, greedy in {(stop, greedy) for _, stop, greedy in asked}:
            alike = [i for i, (_, *how) in enumerate(asked) if how == [stop, greedy]]
            rows = [asked[i][0] for i in alike]
            seeds = self._seeds(
                [f"{before} of {row}" for before, row in zip(self._occurrences(rows), rows, strict=True)]
            )
            for at, (completion,) in self.generation.stream(rows, seeds, self._sampling(1, stop, greedy)):
                yield alike[at], completion

    def _occurrences(self, asked: Sequence[Hashable]) -> list[int]:
        """How often each was asked for before, in this step."""
        counts = []
        with self.lock:
            if self.counted != self.step:
                self.asked_before.clear()
                self.counted = self.step
            for key in asked:
                before = self.asked_before.pop(hash(key), 0)
                counts.append(before)
                self.asked_before[hash(key)] = before + 1
            while len(self.asked_before) > REMEMBERED:  # a copy's step lasts as long as it does
                self.asked_before.popitem(last=False)
        return counts

    def _complete(
        self,
        asked: list[tuple[int, ...]],
        places: Sequence[int | str],
        samples: int,
        stop: frozenset[str],
        greedy: bool,
    ) -> list[Completion]:
        """`samples` of each prompt, side by side. places: what tells the prompts of a step apart."""
        groups = self.generation.generate(asked, self._seeds(places), self._sampling(samples, stop, greedy))
        return [completion for group in groups for completion in group]

    def _seeds(self, places: Sequence[int | str]) -> list[int]:
        return [sample_seed(self.config.grpo.seed, self.step, place) for place in places]

    def _output(self, rows: list[tuple[int, ...]], completions: list[Completion], width: int) -> Any:
        return BatchedDataDict(to_generation_output(rows, completions, width, self.pad_token_id))

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        self.generation.prepare_for_generation()
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        self.generation.finish_generation()
        return True

    def snapshot_step_metrics(self) -> None:
        """Nothing: what a refit counts comes before it, and would belong to no step."""

    def get_step_metrics(self) -> dict[str, float]:
        """Engines started again and prompts asked again since this was asked last: in a step and the refit before."""
        before, self.counts = self.counts, self.generation.metrics()
        return {name: count - before[name] for name, count in self.counts.items()}

    @property
    def requires_kv_scale_sync(self) -> bool:
        return self.config.fp8_kv_cache

    def invalidate_kv_cache(self) -> bool:
        """Every refit drops the prefix cache before it commits (`generation.engine`)."""
        return True

    def prepare_refit_info(self, state_dict_info: Any) -> None:
        """Nothing: trainer and engine agree on a manifest when they are linked (`refit.bridge`)."""

    def update_weights_via_ipc_zmq(self) -> list[Any]:
        """The engine's half of a refit, which the policy's half has done; it raised where it failed."""
        return []

    def update_weights_from_collective(self) -> list[Any]:
        return []

    def init_collective(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []

    def shutdown(self) -> bool:
        self.generation.shutdown()
        return True

    def _continues(self, rows: list[tuple[int, ...]]) -> bool:
        """Whether these prompts are conversations of the call before, each with an environment's answer behind."""
        lengths = {len(answer) for answer in self.answered}
        return all(any(row[:length] in self.answered for length in lengths if length < len(row)) for row in rows)

    def _stop_strings(self, data: Mapping[str, Any]) -> frozenset[str]:
        """The stop strings of the recipe and of any row, for all rows, as NeMo RL's own workers have it."""
        of_rows = (text for texts in data.get("stop_strings") or () for text in texts or ())
        return frozenset(of_rows).union(self.config.policy.generation.stop_strings)

    def _sampling(self, samples: int, stop: frozenset[str], greedy: bool) -> Sampling:
        sampling = Sampling.of_recipe(self.config.policy.generation, samples)
        temperature = 0.0 if greedy else sampling.temperature
        return replace(sampling, temperature=temperature, stop_strings=tuple(sorted(stop)))
