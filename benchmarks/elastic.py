"""Engines join, leave and are killed under load: is an answer lost, is one of mixed weights, does the speed recover?

    python benchmarks/elastic.py [--events 20] [--most 4] [--seed 0] [--dry-run] [--json FILE]

A trainer of one rank and vLLM engines, all Ray actors. Threads ask greedy prompts all the time; the trainer takes a
step and refits the engines after every event. Events are random: one more engine is wanted, one less, or SIGKILL for
the process of one. The wanted number goes through the file that `nemo-fp8rl engines` writes.

Every answer is compared with the first one that was given to its prompt by its version: tokens and log-probs, to the
last bit where the CPU computes a prompt alike beside any others. Before the trainer moves on, its own log-probs of
these first answers are compared with theirs, so the weights were the version's. An answer that differs counts as mixed.

A dry run has three events, for the sake of the tests: its figures say little.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from threading import Lock, Thread
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from rich.console import Console
from rich.table import Table

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.assemble import build_bridge
from nemo_fp8rl.batch import Completion, Prompt, collate
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.data.tokenizer import PromptTokenizer
from nemo_fp8rl.generation.elastic_engines import ElasticEngines, write_wanted
from nemo_fp8rl.generation.engine_pool import EnginePool
from nemo_fp8rl.generation.interface import Sampling
from nemo_fp8rl.policy.rank_group import MegatronPolicy
from nemo_fp8rl.refit.reports import RefitReport

RECIPE = Path(__file__).parent.parent / "conf" / "tiny_cpu.yaml"
FIRST = 3
"""Engines at the start, and at the end."""
CALLERS = 4
TEXTS = [f"{a}+{b}=" for a in range(10, 90, 20) for b in (3, 57)]
IS_ALIKE = not torch.cpu._is_amx_tile_supported()
"""True where a prompt's log-probs have the same bits beside any other prompts (docs/alignment.md)."""
SETTLED_SECONDS = 30.0
"""After so long the next event comes in any case."""
PATIENCE = 600.0
"""Seconds until what should happen must have happened."""


class Load:
    """Threads that ask the same prompts all the time, and what they are answered."""

    def __init__(self, generation: EnginePool, prompts: list[Prompt], sampling: Sampling) -> None:
        self.generation, self.prompts, self.sampling = generation, prompts, sampling
        self.asked = self.answered = self.mixed = 0
        self.by_version = dict[int, int]()
        self.references = dict[tuple[int, int], Completion]()  # by version and prompt
        self.tokens = list[tuple[float, int]]()  # time of an answer, its tokens
        self.failure: BaseException | None = None
        self.counting, self.is_over = Lock(), False
        self.threads = [Thread(target=self._ask, daemon=True) for _ in range(CALLERS)]
        for thread in self.threads:
            thread.start()

    def _ask(self) -> None:
        ids, seeds = [prompt.token_ids for prompt in self.prompts], list(range(len(self.prompts)))
        try:
            while not self.is_over:
                with self.counting:
                    self.asked += len(ids)
                for position, (completion,) in self.generation.stream(ids, seeds, self.sampling):
                    self._count(position, completion)
        except BaseException as error:
            self.failure = error

    def _count(self, prompt: int, completion: Completion) -> None:
        with self.counting:
            version = completion.policy_version
            self.answered += 1
            self.by_version[version] = self.by_version.get(version, 0) + 1
            self.tokens.append((time.monotonic(), len(completion.token_ids)))
            reference = self.references.setdefault((version, prompt), completion)
            self.mixed += not is_same(reference, completion)

    def of_version(self, version: int) -> list[Completion]:
        """Wait until every prompt was answered by the version, and return the answers."""
        self.until(lambda: all((version, i) in self.references for i in range(len(self.prompts))))
        return [self.references[version, i] for i in range(len(self.prompts))]

    def until(self, holds: Any, seconds: float = PATIENCE) -> bool:
        """Wait until it holds; return False where it does not within the seconds. Raises what a caller raised."""
        deadline = time.monotonic() + seconds
        while not holds():
            if self.failure is not None:
                raise self.failure
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def speed(self, begin: float, end: float) -> float:
        """Return tokens a second between two times."""
        return sum(tokens for at, tokens in self.tokens if begin <= at < end) / (end - begin)

    def longest_pause(self, begin: float, end: float) -> float:
        times = [begin, *(at for at, _ in self.tokens if begin <= at < end), end]
        return max(b - a for a, b in pairwise(times))

    def finish(self) -> None:
        self.is_over = True
        for thread in self.threads:
            thread.join(PATIENCE)
        if self.failure is not None:
            raise self.failure


def is_same(one: Completion, other: Completion) -> bool:
    if one.token_ids != other.token_ids or one.policy_version != other.policy_version:
        return False
    if IS_ALIKE:
        return one.logprobs == other.logprobs
    return all(abs(a - b) < 1e-3 for a, b in zip(one.logprobs, other.logprobs, strict=True))


def kill_process(generation: EnginePool, engine: int) -> None:
    """As a node that goes away: no goodbye."""
    import ray

    actor = generation.engines.actors[engine]  # type: ignore[attr-defined]  # of RayWorkers
    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)


def recipe(folder: Path, most: int) -> Config:
    return load(
        RECIPE,
        [
            f"policy.model_name={folder}/model",
            f"data.train.data_path={folder}/data.jsonl",
            f"logger.log_dir={folder}/run",
            "policy.generation.vllm_cfg.async_engine=true",
            "grpo.async_grpo.enabled=true",
            "policy.train_global_batch_size=8",
            "policy.train_micro_batch_size=8",
            "grpo.num_prompts_per_step=4",
            "grpo.num_generations_per_prompt=2",
            "policy.megatron_cfg.optimizer.lr=0.002",
            "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
            "cluster.backend=ray",
            f"cluster.generation_engines={FIRST}",
            "cluster.min_generation_engines=1",
            f"cluster.max_generation_engines={most}",
            "cluster.max_engine_restarts=1000",
        ],
    )


class Scenario:
    """A trainer, its engines under load, and the random events.

    counts: events by kind
    gaps:   of each version, the largest difference between its answers' log-probs and the trainer's
    waits:  seconds until all wanted engines served again, where that was waited for
    """

    def __init__(
        self, cfg: Config, policy: MegatronPolicy, generation: EnginePool, engines: ElasticEngines, tokens: int
    ) -> None:
        self.cfg, self.policy, self.generation, self.engines = cfg, policy, generation, engines
        self.bridge, self.run = engines.bridge, Path(cfg.logger.log_dir)
        tokenizer = PromptTokenizer(cfg.policy)
        self.prompts = [Prompt(i, text, "", tuple(tokenizer.tokenizer(text).input_ids)) for i, text in enumerate(TEXTS)]
        sampling = Sampling(num_generations=1, max_new_tokens=tokens, temperature=0.0, stop_token_ids=())
        self.load = Load(generation, self.prompts, sampling)
        self.counts = dict.fromkeys(("join", "leave", "kill"), 0)
        self.committed, self.reports = {self.bridge.version}, list[RefitReport]()
        self.gaps, self.waits = list[float](), list[float]()

    def train(self) -> None:
        """Compare the version's answers with the trainer, take a step and refit."""
        answers = self.load.of_version(self.bridge.version)
        batch = collate(self.prompts, answers, 0)
        gap = (self.policy.logprobs(batch) - batch.generation_logprobs)[batch.token_mask > 0].abs().max()
        self.gaps.append(float(gap))
        self.policy.train_step(batch, NllLoss())
        self.reports.append(self.bridge.refit())
        self.committed.add(self.bridge.version)

    def act(self, choose: random.Random, most: int) -> str:
        """Have a random event happen, and return its kind."""
        wanted = self.engines.wanted
        possible = {"kill": wanted > 1, "join": wanted < most, "leave": wanted > 1}
        event = choose.choice([event for event, is_possible in possible.items() if is_possible])
        self.counts[event] += 1
        if event == "kill":
            self.load.until(lambda: len(self.generation.serving_engines()) > 1)
            kill_process(self.generation, choose.choice(sorted(self.generation.serving_engines())))
        else:
            self.want(wanted + (1 if event == "join" else -1))
        return event

    def want(self, count: int) -> None:
        write_wanted(self.run, self.cfg.cluster, count)
        self.engines.follow(self.run)

    def is_settled(self) -> bool:
        at_work = self.engines.joining or self.engines.ending
        return not at_work and len(self.generation.serving_engines()) == self.engines.wanted

    def pass_events(self, arguments: argparse.Namespace, say: Any) -> None:
        """Have all events happen, with a step and a refit after each, until the first number of engines serves."""
        choose, began = random.Random(arguments.seed), time.monotonic()
        for number in range(arguments.events):
            at = time.monotonic()
            event = self.act(choose, arguments.most)
            if choose.random() < 0.3:  # or the next event comes while an engine starts
                self.load.until(self.is_settled, SETTLED_SECONDS)
                self.waits.append(time.monotonic() - at)
            else:
                self.load.until(lambda: False, 1 + 2 * choose.random())
            self.train()
            now, serve = time.monotonic() - began, len(self.generation.serving_engines())
            say(f"{now:5.0f} s  event {number + 1}: {event}, {serve} of {self.engines.wanted} engines serve")
            for note in self.engines.follow(self.run):
                say(f"         {note}")
        if self.engines.wanted != FIRST:
            self.want(FIRST)
        if not self.load.until(self.is_settled):
            raise RuntimeError("engines did not come back")

    def wait(self, seconds: float) -> tuple[float, float]:
        """Wait; return the times of the begin and the end."""
        begin = time.monotonic()
        self.load.until(lambda: time.monotonic() - begin > seconds)
        return begin, time.monotonic()

    def figures(self, spans: dict[str, tuple[float, float]]) -> dict[str, Any]:
        """Return all figures. spans: (begin, end) of the times before, during and after the events"""
        load, engines, reports = self.load, self.engines, self.reports
        return {
            "events": self.counts,
            "joined": engines.joined,
            "left": engines.left,
            "lost_engines": engines.lost,
            "refits": len(reports),
            "refit_retries": sum(report.retries for report in reports),
            "longest_refit_seconds": max(report.seconds for report in reports),
            "prompts_asked": load.asked,
            "prompts_answered": load.answered,
            "prompts_asked_again": self.generation.prompts_retried,
            "lost": load.asked - load.answered,
            "mixed": load.mixed,
            "of_unknown_version": sum(n for version, n in load.by_version.items() if version not in self.committed),
            "largest_gap_to_the_trainer": max(self.gaps),
            "bits_compared": IS_ALIKE,
            "answers_by_version": {str(version): n for version, n in sorted(load.by_version.items())},
            "seconds_of_events": spans["during"][1] - spans["during"][0],
            "seconds_until_settled": self.waits,
            "tokens_per_second": {name: load.speed(*span) for name, span in spans.items()},
            "longest_pause_seconds": {name: load.longest_pause(*span) for name, span in spans.items()},
        }


def measure(folder: Path, arguments: argparse.Namespace, say: Any) -> dict[str, Any]:
    """Return what happened: events, answers by version, lost and mixed ones, and speeds."""
    cfg = recipe(folder, arguments.most)
    Path(cfg.logger.log_dir).mkdir()
    policy, generation = MegatronPolicy(cfg), EnginePool(cfg)
    try:
        bridge = build_bridge(cfg, policy, generation)
        bridge.refit()
        with ElasticEngines(generation, bridge) as engines:
            scenario = Scenario(cfg, policy, generation, engines, arguments.tokens)
            scenario.train()
            spans = {"before": scenario.wait(arguments.seconds)}
            scenario.pass_events(arguments, say)
            spans["during"] = spans["before"][1], time.monotonic()
            scenario.train()
            spans["after"] = scenario.wait(arguments.seconds)
            scenario.load.finish()
            return scenario.figures(spans)
    finally:
        generation.shutdown()
        policy.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--most", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement before and after")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.dry_run:
        arguments.events, arguments.seconds = 3, 1.0
    warnings.filterwarnings("ignore")

    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(Path(folder), "add")
        figures = measure(Path(folder), arguments, lambda text: console.print(text, soft_wrap=True))
    table = Table("", "value")
    for name, value in figures.items():
        table.add_row(name, json.dumps(value))
    console.print(table)
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in ("events", "most", "tokens", "seconds", "seed")}
        arguments.json.write_text(json.dumps({"settings": settings, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
