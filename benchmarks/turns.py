"""How long do conversations of several turns take that ask row by row, as NeMo RL's asynchronous rollouts do?

    python benchmarks/turns.py [--conversations 64] [--turns 3] [--rounds 3] [--json FILE]

One engine with `async_engine`, a random model whose answers end by chance, so that a few are long; both ways in turns:

    one by one     what comes together is asked as one, and what comes meanwhile waits until all of that is answered
    side by side   each answer goes back as soon as it is there, and the engine works on all that is asked
"""

import argparse
import asyncio
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from threading import Lock

os.environ.setdefault("OMP_NUM_THREADS", "1")
from measure import seconds
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from nemo_fp8rl.assemble import build_bridge
from nemo_fp8rl.batch import Completion
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation.engine_client import CALLS_AT_ONCE
from nemo_fp8rl.generation.engine_pool import EnginePool
from nemo_fp8rl.generation.interface import Sampling
from nemo_fp8rl.nemo_rl.adapters.coalescer import Coalescer
from nemo_fp8rl.policy.rank_group import MegatronPolicy

RECIPE = Path(__file__).parent.parent / "conf" / "tiny_cpu.yaml"
SAMPLING = Sampling(num_generations=1, max_new_tokens=64, temperature=1.0, stop_token_ids=(1, 2, 3, 4))
Asked = tuple[tuple[int, ...], int]
"""A conversation so far, and the seed of its next answer."""


def answers(generation: EnginePool, asked: Sequence[Asked]) -> Iterator[tuple[int, Completion]]:
    rows, seeds = zip(*asked, strict=True)
    for at, (completion,) in generation.stream(rows, seeds, SAMPLING):
        yield at, completion


async def converse(ask: Coalescer[Asked, Completion], number: int, turns: int) -> tuple[int, ...]:
    """All tokens: some to begin with, and after each answer some of an environment."""
    said: tuple[int, ...] = (5 + number % 12, 5, 6, 7)
    for turn in range(turns):
        completion = await ask((said, 1000 * turn + number))
        said += (*completion.token_ids, 6, 7)
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")

    taken: dict[str, list[float]] = {"one by one": [], "side by side": []}
    with tempfile.TemporaryDirectory() as folder, Progress() as progress:
        task = progress.add_task("turns", total=1 + 2 * arguments.rounds)
        make_tiny(Path(folder), "add")
        cfg = load(
            RECIPE,
            [
                f"policy.model_name={folder}/model",
                f"data.train.data_path={folder}/data.jsonl",
                "policy.max_total_sequence_length=256",
                "policy.generation.vllm_cfg.async_engine=true",
                f"logger.log_dir={folder}/run",
            ],
        )
        policy, generation = MegatronPolicy(cfg), EnginePool(cfg)
        build_bridge(cfg, policy, generation).refit()
        alone = Lock()

        def one_by_one(asked: Sequence[Asked]) -> list[tuple[int, Completion]]:
            with alone:
                return list(answers(generation, asked))

        ways = {"one by one": one_by_one, "side by side": lambda asked: answers(generation, asked)}

        async def all_of(way: str) -> list[tuple[int, ...]]:
            ask = Coalescer(ways[way], CALLS_AT_ONCE)
            numbers = range(arguments.conversations)
            return await asyncio.gather(*(converse(ask, number, arguments.turns) for number in numbers))

        said = {way: asyncio.run(all_of(way)) for way in ways}  # warms, too
        progress.advance(task)
        for _ in range(arguments.rounds):
            for way, times in taken.items():
                times.append(seconds(lambda way=way: asyncio.run(all_of(way))))
                progress.advance(task)
        generation.shutdown()
        policy.shutdown()

    equal = sum(a == b for a, b in zip(*said.values(), strict=True)) / arguments.conversations
    middle = {way: median(times) for way, times in taken.items()}
    ratio = middle["one by one"] / middle["side by side"]
    table = Table("way", "seconds")
    for way, time in middle.items():
        table.add_row(way, f"{time:.2f}")
    console = Console()
    console.print(table)
    console.print(f"side by side is {ratio:.2f} times as fast; {equal:.0%} of the conversations are equal to the token")
    if arguments.json:
        record = {
            "conversations": arguments.conversations,
            "turns": arguments.turns,
            "rounds": arguments.rounds,
            "seconds": {way: round(time, 3) for way, time in middle.items()},
            "ratio": round(ratio, 3),
            "equal": equal,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
