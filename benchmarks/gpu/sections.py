"""The command line and the loop of a script that compares in sections, each with a share of the time.

It loads no torch, because a dry run must first choose Triton's interpreter.
"""

import argparse
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.report import Report

Compare = Callable[["Report", bool, int], None]
"""(report, whether this is a dry run, calls of which the time is the median)"""


def parse(description: str, sections: Mapping[str, float], seconds: float) -> argparse.Namespace:
    """Read the command line; the rounds of a dry run are 1.

    sections: with their shares of the time, the most important first
    seconds:  the time limit, unless the command says another
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=seconds, help="time limit")
    parser.add_argument("--sections", nargs="+", choices=sections, default=[*sections])
    parser.add_argument("--rounds", type=int, default=10, help="calls of which the time is the median")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    arguments.rounds = 1 if arguments.dry_run else arguments.rounds
    arguments.refuse = parser.error
    return arguments


def run(
    arguments: argparse.Namespace,
    sections: Mapping[str, float],
    compare: Mapping[str, Compare],
    cpu: str,
    with_gradients: Collection[str] = (),
) -> int:
    """Run the sections of the command line, and return the exit status.

    cpu:             the name of what runs in the place of a GPU
    with_gradients:  sections that need them
    """
    import torch

    from benchmarks.gpu.report import Report, versions

    on_gpu, report = torch.cuda.is_available(), Report(arguments.seconds)
    print(torch.cuda.get_device_name() if on_gpu else cpu, versions())
    names = [name for name in sections if name in arguments.sections]
    for i, name in enumerate(names):
        share = sections[name] / sum(sections[other] for other in names[i:])
        with report.section(name, report.seconds_left() * share), torch.set_grad_enabled(name in with_gradients):
            compare[name](report, arguments.dry_run, arguments.rounds)
        if on_gpu:
            torch.cuda.empty_cache()
    return report.close(arguments.json)
