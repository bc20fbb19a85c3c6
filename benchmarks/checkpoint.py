"""Measures the time to write and read a checkpoint, in comparison with a plain write of the same bytes.

    python benchmarks/checkpoint.py [--ranks 2] [--layers 8] [--rounds 3] [--json FILE]

Data-parallel ranks are Ray actors on this machine. They have layers of Qwen3-0.6B's shape with random weights, and take
one optimizer step, so that moments exist. In turns the policy saves, the policy loads, and this process alone writes
one safetensors file of the same size. The results are medians of wall-clock seconds; files are read from the page
cache.
"""

import argparse
import json
import os
import shutil
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from measure import QWEN3_06B, seconds
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.torch import save_file

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.batch import RolloutBatch
from nemo_fp8rl.commands.tiny_model import make_tiny, write_model
from nemo_fp8rl.common.machine import machine
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.policy.rank_group import MegatronPolicy

RECIPE = Path(__file__).parent.parent / "conf" / "tiny_cpu.yaml"


def policy(folder: Path, ranks: int, layers: int) -> MegatronPolicy:
    make_tiny(folder, "add")
    write_model(folder / "big", 0, "qwen3", **QWEN3_06B | {"num_hidden_layers": layers})
    options = [
        f"policy.model_name={folder}/big",
        f"data.train.data_path={folder}/data.jsonl",
        f"logger.log_dir={folder}/run",
        "nemo_fp8rl.flow=bf16",
        "policy.train_micro_batch_size=2",
        "policy.logprob_batch_size=2",
        "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
    ]
    built = MegatronPolicy(load(RECIPE, [*options, "cluster.backend=ray", f"cluster.train_ranks={ranks}"]))
    rows = 2 * ranks
    batch = RolloutBatch(
        input_ids=torch.randint(2, 16, (rows, 8)),
        input_lengths=torch.full((rows,), 8),
        token_mask=torch.ones(rows, 8),
        sample_mask=torch.ones(rows),
        generation_logprobs=torch.zeros(rows, 8),
    )
    built.train_step(batch, NllLoss())
    return built


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")

    taken: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name, Progress() as progress:
        task, folder = progress.add_task("checkpoints", total=arguments.rounds), Path(name)
        trainer, saved = policy(folder / "tiny", arguments.ranks, arguments.layers), folder / "saved"
        for _ in range(arguments.rounds):
            taken["save"].append(seconds(lambda: trainer.save(saved)))
            nbytes = sum(path.stat().st_size for path in saved.rglob("*.safetensors"))
            taken["load"].append(seconds(lambda: trainer.load(saved)))
            shutil.rmtree(saved)
            plain = {"all": torch.ones(nbytes, dtype=torch.uint8)}
            taken["plain write"].append(seconds(lambda plain=plain: save_file(plain, folder / "plain.safetensors")))
            (folder / "plain.safetensors").unlink()
            progress.advance(task)
        trainer.shutdown()

    floor = median(taken["plain write"])
    table = Table(f"{nbytes / 1e9:.2f} GB, {arguments.ranks} ranks", "s", "/ plain write")
    for what, times in taken.items():
        table.add_row(what, f"{median(times):.2f}", f"{median(times) / floor:.2f}")
    Console(width=100).print(table)
    if arguments.json:
        figures = {"machine": machine(), "torch": torch.__version__, "ranks": arguments.ranks, "nbytes": nbytes}
        text = json.dumps(figures | {"seconds": dict(taken)}, indent=1) + "\n"
        arguments.json.write_text(text)


if __name__ == "__main__":
    main()
