"""The package's vLLM engines with NeMo RL's GenerationInterface."""

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
from nemo_fp8rl.generation.engine_client import CALLS_AT_ONCE
from nemo_fp8rl.generation.engine_pool import EnginePool
from nemo_fp8rl.generation.interface import Sampling, sample_seed
from nemo_fp8rl.nemo_rl.adapters.batched_data import merge_repeats, to_generation_output, unpad_prompts
from nemo_fp8rl.nemo_rl.adapters.coalescer import Coalescer
from nemo_fp8rl.nemo_rl.adapters.version_ledger import record_answer, start_ledger
from nemo_fp8rl.refit.bridge import RefitBridge

MAX_COUNTED_PROMPTS = 1 << 18
"""Number of prompts for which `VllmFp8Generation` remembers how often they were asked."""


class VllmFp8Generation(GenerationInterface):
    """An engine pool that samples reproducibly: a resumed run samples what an uninterrupted run does.

    Seeds depend on grpo.seed and the version of the weights. In `generate` they also depend on a prompt's position in
    the call and the turn of its conversation. In `generate_async` calls have no order, so seeds depend on the prompt
    and on how often it was asked with this version.

    A copy in another process (NeMo RL's collector of trajectories) generates with the same engines, if the engines are
    processes. The copy replaces no dead engine and treats all its calls as one version.

    bridge:               counts the versions of the weights; None before `connect_bridge`, and in a copy
    weight_synchronizer:  NeMo RL refits through it, if the version of NeMo RL looks for one
    ledger:               remembers the versions of answers; None without updates in flight
    """

    bridge: RefitBridge | None = None
    weight_synchronizer: Any = None

    def __init__(self, generation: EnginePool, cfg: Config, generation_cfg: Mapping[str, Any], pad: int) -> None:
        """Wrap the engines.

        generation_cfg:  NeMo RL's block policy.generation, which its loops read from the attribute cfg
        pad:             token id that pads outputs
        """
        self.generation, self.config, self.cfg, self.pad_token_id = generation, cfg, generation_cfg, pad
        self.turn, self.conversations = 0, set[tuple[int, ...]]()
        self.counts = generation.metrics()
        self.ledger = start_ledger() if cfg.updates_in_flight else None
        self._reset_process_state()

    def connect_bridge(self, bridge: RefitBridge, weight_synchronizer: Any) -> None:
        """Take the refit's two ends, which exist only after this object; call it before the first generation."""
        self.bridge, self.weight_synchronizer = bridge, weight_synchronizer

    def _reset_process_state(self) -> None:
        self.prompt_counts = OrderedDict[int, int]()  # hash of a prompt -> how often it was asked in counted_step
        self.counted_step = ""
        self.lock = Lock()
        self.coalescer = Coalescer(self._answer, CALLS_AT_ONCE)

    @property
    def step(self) -> str:
        """Step of the loop to which the next answers belong; in a copy, the step in which the copy was made."""
        return self.origin if self.bridge is None else str(self.bridge.version + 1)

    def __getstate__(self) -> dict[str, Any]:
        process_state = ("bridge", "weight_synchronizer", "prompt_counts", "counted_step", "lock", "coalescer")
        state = {name: value for name, value in self.__dict__.items() if name not in process_state}
        return state | {"origin": f"{self.step}, collected"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_process_state()

    def generate(self, data: Mapping[str, Any], greedy: bool = False) -> Any:
        """Return NeMo RL's GenerationOutputSpec (`batched_data.to_generation_output`)."""
        rows = unpad_prompts(data["input_ids"], data["input_lengths"])
        prompts, samples = merge_repeats(rows)
        self.turn = self.turn + 1 if self._continues(rows) else 0
        positions: list[int | str] = [f"{i} of turn {self.turn}" if self.turn else i for i in range(len(prompts))]
        # A prompt may come again in a later call of the step, as in a validation set that repeats its prompts.
        counts = self._count_occurrences(list(zip(positions, prompts, strict=True)))
        positions = [f"{position} again {n}" if n else position for position, n in zip(positions, counts, strict=True)]
        completions = self._complete(prompts, positions, samples, self._stop_strings(data), greedy)
        self.conversations = {row + completion.token_ids for row, completion in zip(rows, completions, strict=True)}
        return self._output(rows, completions, data["input_ids"].size(1))

    async def generate_async(self, data: Mapping[str, Any], greedy: bool = False) -> AsyncIterator[tuple[int, Any]]:
        """Yield (index, GenerationOutputSpec) of each row; rows of concurrent calls are answered together."""
        stop, width = self._stop_strings(data), data["input_ids"].size(1)
        rows = unpad_prompts(data["input_ids"], data["input_lengths"])
        answers = await asyncio.gather(*(self.coalescer((row, stop, greedy)) for row in rows))
        for i, completion in enumerate(answers):
            yield i, self._output(rows[i : i + 1], [completion], width)

    def _answer(
        self, calls: Sequence[tuple[tuple[int, ...], frozenset[str], bool]]
    ) -> Iterator[tuple[int, Completion]]:
        """Yield (position in calls, completion); calls with the same sampling parameters go to the engines together."""
        for stop, greedy in {(stop, greedy) for _, stop, greedy in calls}:
            positions = [i for i, (_, *parameters) in enumerate(calls) if parameters == [stop, greedy]]
            rows = [calls[i][0] for i in positions]
            counts = self._count_occurrences(rows)
            seeds = self._seeds([f"{count} of {row}" for count, row in zip(counts, rows, strict=True)])
            for index, (completion,) in self.generation.stream(rows, seeds, self._sampling(1, stop, greedy)):
                if self.ledger is not None:
                    record_answer(self.ledger, rows[index], completion)
                yield positions[index], completion

    def _count_occurrences(self, keys: Sequence[Hashable]) -> list[int]:
        """Return how often each key was counted before in this step, and count it."""
        counts = []
        with self.lock:
            if self.counted_step != self.step:
                self.prompt_counts.clear()
                self.counted_step = self.step
            for key in keys:
                count = self.prompt_counts.pop(hash(key), 0)
                counts.append(count)
                self.prompt_counts[hash(key)] = count + 1
            while len(self.prompt_counts) > MAX_COUNTED_PROMPTS:  # a copy stays in one step, so its counts only grow
                self.prompt_counts.popitem(last=False)
        return counts

    def _complete(
        self,
        prompts: list[tuple[int, ...]],
        positions: Sequence[int | str],
        samples: int,
        stop: frozenset[str],
        greedy: bool,
    ) -> list[Completion]:
        """Return `samples` completions of each prompt, side by side. positions: unique in a step, for the seeds."""
        groups = self.generation.generate(prompts, self._seeds(positions), self._sampling(samples, stop, greedy))
        return [completion for group in groups for completion in group]

    def _seeds(self, positions: Sequence[int | str]) -> list[int]:
        return [sample_seed(self.config.grpo.seed, self.step, position) for position in positions]

    def _output(self, rows: list[tuple[int, ...]], completions: list[Completion], width: int) -> Any:
        return BatchedDataDict(to_generation_output(rows, completions, width, self.pad_token_id))

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        self.generation.prepare_for_generation()
        return True

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        self.generation.finish_generation()
        return True

    def snapshot_step_metrics(self) -> None:
        """Do nothing: the counts of a refit come before the snapshot and would belong to no step."""

    def get_step_metrics(self) -> dict[str, float]:
        """Return the engine restarts and repeated prompts since the last call: those of a step and the refit before.

        With a window of the cache, the blocks that requests took as well.
        """
        before, self.counts = self.counts, self.generation.metrics()
        has_window = self.config.policy.generation.vllm_cfg.kv_window is not None
        blocks = self.generation.take_cache_metrics() if has_window else {}
        return {name: count - before[name] for name, count in self.counts.items()} | blocks

    @property
    def requires_kv_scale_sync(self) -> bool:
        return self.config.fp8_kv_cache

    def invalidate_kv_cache(self) -> bool:
        """Do nothing: every refit drops the prefix cache before it commits, or as it pauses the engines
        (`generation.engine`); it looks at grpo.async_grpo.recompute_kv_cache_after_weight_updates itself.
        """
        return True

    def prepare_refit_info(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: trainer and engine agree on a manifest when they are linked (`refit.bridge`)."""

    def update_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Do nothing: the policy's half has done the whole refit, and raised if it failed."""
        return []

    def update_weights_from_collective(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []

    def init_collective(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []

    def shutdown(self) -> bool:
        self.generation.shutdown()
        return True

    def _continues(self, rows: list[tuple[int, ...]]) -> bool:
        """Return whether each row is a conversation of the previous call, followed by an environment's answer."""
        lengths = {len(tokens) for tokens in self.conversations}
        return all(any(row[:length] in self.conversations for length in lengths if length < len(row)) for row in rows)

    def _stop_strings(self, data: Mapping[str, Any]) -> frozenset[str]:
        """Return the stop strings of the recipe and of all rows together, as NeMo RL's own workers do."""
        row_strings = (text for texts in data.get("stop_strings") or () for text in texts or ())
        return frozenset(row_strings).union(self.config.policy.generation.stop_strings)

    def _sampling(self, samples: int, stop: frozenset[str], greedy: bool) -> Sampling:
        sampling = Sampling.of_recipe(self.config.policy.generation, samples)
        temperature = 0.0 if greedy else sampling.temperature
        return replace(sampling, temperature=temperature, stop_strings=tuple(sorted(stop)))
