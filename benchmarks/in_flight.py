"""How many tokens a second does an engine give while the weights change, in flight and fenced?

    python benchmarks/in_flight.py [--seconds 20] [--every 0.5] [--rounds 3] [--dry-run] [--json FILE]

One engine with its core in a process of its own, and a refit from a trainer in this process `--every` so many seconds.
Prompts are asked all the time, as many as the engine works on at once. Three ways in turns, in one run:

    fenced      a refit waits until the answers in progress are complete; no prompt is asked meanwhile
    kept        answers go on from the new weights, with the keys of the old ones
    recomputed  the same, and their keys are computed again

A dry run is as short as can be, for the sake of the tests: its figures say nothing.
"""

import argparse
import json
import os
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from threading import Condition, Thread

os.environ.setdefault("OMP_NUM_THREADS", "1")
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from nemo_fp8rl.assemble import build_bridge
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation.engine_pool import EnginePool
from nemo_fp8rl.generation.interface import Sampling
from nemo_fp8rl.policy.rank_group import MegatronPolicy

RECIPE = Path(__file__).parent.parent / "conf" / "tiny_cpu.yaml"
IN_FLIGHT = ("grpo.async_grpo.enabled=true", "grpo.async_grpo.in_flight_weight_updates=true")
WAYS = {
    "fenced": (),
    "kept": IN_FLIGHT,
    "recomputed": (*IN_FLIGHT, "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true"),
}
CALLERS = 4
"""Threads that ask: each has the next prompts ready when its last are answered."""
PROMPT = (5, 6, 7, 8)


class Asker:
    """Threads that ask for answers all the time, except while `pause` holds them (the fenced way)."""

    def __init__(self, generation: EnginePool, sampling: Sampling, prompts: int) -> None:
        self.generation, self.sampling, self.prompts = generation, sampling, prompts
        self.tokens = self.mixed = self.asking = 0
        self.holds = self.is_over = False
        self.changed = Condition()
        self.threads = [Thread(target=self._ask, args=(caller,)) for caller in range(CALLERS)]
        for thread in self.threads:
            thread.start()

    def _ask(self, caller: int) -> None:
        call = 0
        while not self.is_over:
            with self.changed:
                self.changed.wait_for(lambda: not self.holds or self.is_over)
                self.asking += 1
            try:
                seeds = [(caller * 1000 + call) * self.prompts + i for i in range(self.prompts)]
                groups = self.generation.generate([PROMPT] * self.prompts, seeds, self.sampling)
            finally:
                with self.changed:
                    self.asking -= 1
                    self.changed.notify_all()
            call += 1
            with self.changed:
                self.tokens += sum(len(c.token_ids) for group in groups for c in group)
                self.mixed += sum(len({*c.token_versions}) > 1 for group in groups for c in group)

    def hold(self, holds: bool) -> None:
        """Ask for nothing more, and wait for what is being answered; or ask again."""
        with self.changed:
            self.holds = holds
            self.changed.notify_all()
            if holds:
                self.changed.wait_for(lambda: not self.asking)

    def end(self) -> None:
        self.is_over = True
        self.hold(False)
        for thread in self.threads:
            thread.join()


def measure(folder: Path, way: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Return tokens a second, refits, and the share of answers of several versions."""
    cfg = load(
        RECIPE,
        [
            f"policy.model_name={folder}/model",
            f"data.train.data_path={folder}/data.jsonl",
            "policy.max_total_sequence_length=256",
            "policy.generation.vllm_cfg.async_engine=true",
            f"logger.log_dir={folder}/run",
            *WAYS[way],
        ],
    )
    sampling = Sampling(num_generations=1, max_new_tokens=arguments.tokens, temperature=1.0, stop_token_ids=(1, 2))
    policy, generation = MegatronPolicy(cfg), EnginePool(cfg)
    try:
        bridge = build_bridge(cfg, policy, generation)
        bridge.refit()
        generation.generate([PROMPT], [0], sampling)  # warms
        asker, refits, start = Asker(generation, sampling, arguments.prompts), 0, time.perf_counter()
        while time.perf_counter() - start < arguments.seconds:
            time.sleep(arguments.every)
            if way == "fenced":
                asker.hold(True)
            bridge.refit()
            refits += 1
            asker.hold(False)
        seconds, tokens = time.perf_counter() - start, asker.tokens
        asker.end()
        return {"tokens_per_second": tokens / seconds, "refits": refits, "answers_of_several_versions": asker.mixed}
    finally:
        generation.shutdown()
        policy.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=0.5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.dry_run:
        arguments.seconds, arguments.every, arguments.tokens, arguments.rounds = 1.0, 0.2, 20, 1
    warnings.filterwarnings("ignore")

    measured: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder, Progress() as progress:
        task = progress.add_task("in flight", total=len(WAYS) * arguments.rounds)
        make_tiny(Path(folder), "add")
        for _ in range(arguments.rounds):
            for way, found in measured.items():
                found.append(measure(Path(folder), way, arguments))
                progress.advance(task)

    middle = {way: {name: median(each[name] for each in found) for name in found[0]} for way, found in measured.items()}
    fenced = middle["fenced"]["tokens_per_second"]
    table = Table("way", "tokens/s", "/ fenced", "refits", "answers of several versions")
    for way, figures in middle.items():
        speed = figures["tokens_per_second"]
        others = (f"{figures[name]:g}" for name in ("refits", "answers_of_several_versions"))
        table.add_row(way, f"{speed:.0f}", f"{speed / fenced:.2f}" if fenced else "-", *others)
    Console().print(table)
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in ("seconds", "every", "tokens", "prompts", "rounds")}
        arguments.json.write_text(json.dumps({"settings": settings, "ways": middle}, indent=1) + "\n")


if __name__ == "__main__":
    main()
