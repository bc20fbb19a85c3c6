"""Measures memory and time of the policy's log-probs, in comparison with the logits of the whole batch.

    python benchmarks/logprobs.py [--rows 8] [--tokens 2048] [--vocab 151936] [--hidden 128] [--json FILE]

It runs a forward without gradient, and a forward with backward, on bfloat16 [rows * tokens, hidden] and a head
[vocab, hidden]. Memory is the growth of the process's peak; the table compares it with the float32 logits of one chunk.
With backward it includes the head's gradient, 6 bytes for each of vocab * hidden values (float32, and its copy in
bfloat16), for any chunk: at hidden 128 this is little, at 4096 it is more than several chunks. Whole logits are
computed for as many sequences as fit into --limit-gib. Each case runs in its own process. Results go to
benchmarks/results/logprobs_cpu.json, or to the path of --json.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from measure import peak_growth, seconds
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nemo_fp8rl.common.machine import machine
from nemo_fp8rl.policy.layers.logprobs import token_logprobs

RESULTS = Path(__file__).resolve().parent / "results" / "logprobs_cpu.json"
CHUNKS = (256, 1024)
WHOLE_COPIES = 2, 3
"""Float32 copies of the whole logits at the peak, forward and with backward, measured with --rows 1."""


def whole(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Return log-probs as a framework that materializes the logits computes them."""
    return (hidden @ head.t()).float().log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


def one_case(chunk: int, backward: bool, tokens: int, vocab: int, hidden_size: int) -> dict[str, float]:
    """Measure one case; chunk 0 is the whole batch."""
    torch.set_num_threads(os.cpu_count() or 1)
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=random).bfloat16().requires_grad_(backward)
    head = (torch.randn(vocab, hidden_size, generator=random) * 0.05).bfloat16().requires_grad_(backward)
    targets = torch.randint(0, vocab, (tokens,), generator=random)

    def call() -> None:
        made = whole(hidden, head, targets) if not chunk else token_logprobs(hidden, head, targets, 1.0, chunk)
        if backward:
            made.mean().backward()

    took: list[float] = []
    grown = peak_growth(lambda: took.append(seconds(call)))
    return {"seconds": took[0], "peak_bytes": grown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--limit-gib", type=float, default=8.0)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--case", nargs=2, type=int, metavar=("CHUNK", "BACKWARD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        chunk, backward = arguments.case
        tokens = arguments.rows * arguments.tokens
        print(json.dumps(one_case(chunk, bool(backward), tokens, arguments.vocab, arguments.hidden)))
        return
    row = arguments.tokens * arguments.vocab * 4
    cases: list[dict[str, Any]] = []
    for chunk in (*CHUNKS, 0):
        for backward in (0, 1):
            fitting = int(arguments.limit_gib * 2**30 / (row * WHOLE_COPIES[backward]))
            rows = arguments.rows if chunk else min(arguments.rows, fitting)
            if rows:
                again = [*sys.argv, "--rows", str(rows), "--case", str(chunk), str(backward)]
                done = subprocess.run([sys.executable, *again], check=True, capture_output=True)
                cases.append({"chunk": chunk, "backward": bool(backward), "rows": rows, **json.loads(done.stdout)})
    result = {
        "machine": machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "shape": {name: getattr(arguments, name) for name in ("rows", "tokens", "vocab", "hidden")},
        "cases": cases,
    }
    table = Table("sequences", "tokens at a time", "", "seconds", "peak MiB", "of their fp32 logits")
    for case in cases:
        at_a_time = case["chunk"] or case["rows"] * arguments.tokens
        table.add_row(
            str(case["rows"]),
            str(at_a_time),
            "forward, backward" if case["backward"] else "forward",
            f"{case['seconds']:.1f}",
            f"{case['peak_bytes'] / 2**20:.0f}",
            f"{case['peak_bytes'] / (at_a_time * arguments.vocab * 4):.2f}",
        )
    Console().print(table)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
