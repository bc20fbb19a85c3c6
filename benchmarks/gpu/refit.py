"""The cost of a refit on GPUs, whole, as a delta and the classic way, and where its time goes.

    python benchmarks/gpu/refit.py [--seconds 300] [--rounds 5] [--layers 8] [--json FILE] [--dry-run]

The trainer is this process, the engine another one: on the second GPU if two are visible, else on the same. Sections:

digests   the kernel for a message's pieces beside the formula in torch and a copy; its host time
delta     find and pack, check, and apply the changes of one step at 1e-6: time and bytes, and the rate of a link below
          which a delta pays, from these times and from passes over the memory
refit     between the processes, taking turns: classic, whole, whole without digests, delta, delta without digests, and
          the wire; seconds by stage. Goals: whole at most 0.5 of classic, digests below 2 % of whole
stages    the trainer alone, into links that release at once; messages alone; one call of the engine; one wait for a GPU
auto      what refit.mode=auto takes

`benchmarks/refit.py` says what the ways are. --dry-run has the smallest sizes on a CPU, its kernels in Triton's
interpreter; its figures say nothing about a GPU.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from benchmarks.gpu.report import DEVICE, ON_GPU, Report, milliseconds, start

GOAL_FULL, GOAL_DIGESTS = 0.5, 0.02
"""Of the classic way's time, and of a whole refit's."""
MESSAGE_PIECES, PIECE_BYTES = (6, 1 << 24) if ON_GPU else (2, 1 << 16)
"""A message of the model below has so many pieces of so many bytes."""
HBM_PASSES = {"pack": 2.0, "check and apply": 0.04}
"""Bytes that a delta's kernels move for each byte of a weight, at 0.4 % changed; the copy that it saves is left out."""
HBM_RATE = 4.8e12
"""Bytes a second, of an H200 by its data sheet."""


def prepare_child(dry_run: bool) -> None:
    """In the process of the kernels: on a CPU their interpreter."""
    if dry_run:
        from tests.interpreted_triton import interpret

        interpret()


def measure_digests(rounds: int) -> dict[str, Any]:
    """Return times in ms, and whether the kernel's sums are the formula's."""
    from nemo_fp8rl.fp8.kernels.triton_digest import sum_contents
    from nemo_fp8rl.refit.digest import A, B, K, sum_words

    pieces = [torch.randint(256, (PIECE_BYTES,), dtype=torch.uint8, device=DEVICE) for _ in range(MESSAGE_PIECES)]
    contents = [(torch.rand(PIECE_BYTES >> 14, device=DEVICE), piece) for piece in pieces]
    rows = [(piece.view(64, -1)[:, : PIECE_BYTES // 128],) for piece in pieces]
    copies = [torch.empty_like(piece) for piece in pieces]

    def copy() -> None:
        for target, piece in zip(copies, pieces, strict=True):
            target.copy_(piece)

    calls = {
        "kernel": lambda: sum_contents(contents, (K, A, B)),
        "kernel, half of each row": lambda: sum_contents(rows, (K, A, B)),
        "formula": lambda: [sum_words(*tensors) for tensors in contents],
        "copy": copy,
    }
    found: dict[str, Any] = {name: milliseconds(call, rounds) for name, call in calls.items()}
    found["equal"] = calls["kernel"]().tolist() == [int(total) for total in calls["formula"]()]
    found["rows equal"] = calls["kernel, half of each row"]().tolist() == [int(sum_words(*r)) for r in rows]
    wait_for_gpu()
    begin = time.perf_counter()
    calls["kernel"]()
    found["host"] = 1e3 * (time.perf_counter() - begin)
    wait_for_gpu()
    return found | {"nbytes": sum(piece.nbytes for piece in pieces)}


def measure_delta(rounds: int) -> dict[str, Any]:
    """Return times in ms and bytes of a delta of one piece, and whether it gives the new bytes."""
    from benchmarks.quantize import weights
    from nemo_fp8rl.fp8 import quantize_blockwise
    from nemo_fp8rl.fp8.kernels import triton_tiles
    from nemo_fp8rl.fp8.kernels.tile_format import body_capacity, body_start

    before, after = (values.to(DEVICE) for values in weights(PIECE_BYTES >> 12 or 1, 1 << 12))
    old, new = (quantize_blockwise(values).data.view(torch.uint8).view(-1) for values in (before, after))
    numel = len(old)
    message = torch.empty(body_start(numel) + body_capacity(numel), dtype=torch.uint8, device=DEVICE)
    used = torch.zeros(rounds + 4, 1, dtype=torch.int32, device=DEVICE)
    counters = iter(used)
    times = {"pack": milliseconds(lambda: triton_tiles.pack(old, new, message, next(counters)), rounds)}
    packed = message[: body_start(numel) + int(used[0])]
    whole, target = old.clone(), old.clone()

    def check_and_apply() -> None:
        triton_tiles.apply_(target, packed, triton_tiles.check(packed, numel))

    times["check and apply"] = milliseconds(check_and_apply, rounds)
    times["quantize"] = milliseconds(lambda: quantize_blockwise(after), rounds)
    copied = torch.empty_like(old)
    times["copy"] = milliseconds(lambda: copied.copy_(new), rounds)
    triton_tiles.apply_(whole, packed, triton_tiles.check(packed, numel))
    return {
        "ms": times,
        "bytes": numel,
        "changed": float((old != new).float().mean()),
        "message": len(packed),
        "equal": torch.equal(whole, new),
    }


def show_digests(report: Report, found: dict[str, Any]) -> None:
    for name in ("copy", "kernel", "kernel, half of each row", "formula"):
        nbytes = found["nbytes"] / (2 if "half" in name else 1)
        report.add(name, f"{found[name]:.3f} ms, {nbytes / found[name] / 1e6:.0f} GB/s", ms=found[name])
    report.add("host time of a launch", f"{found['host']:.3f} ms for {MESSAGE_PIECES} pieces", ms=found["host"])
    for name in ("equal", "rows equal"):
        report.add(name, str(found[name]), equal=found[name])
        if not found[name]:
            report.failures.append(f"digests: {name}")


def show_delta(report: Report, found: dict[str, Any]) -> None:
    """Add the times and the rate of a link at which a delta takes as long as all bytes."""
    nbytes, ms, saved = found["bytes"], found["ms"], found["bytes"] - found["message"]
    for name, each in ms.items():
        report.add(name, f"{each:.3f} ms, {nbytes / each / 1e6:.0f} GB/s of weights", ms=each)
    size = f"{100 * found['message'] / nbytes:.2f} % of the bytes, where {100 * found['changed']:.2f} % changed"
    report.add("message", size, message=found["message"], changed=found["changed"])
    report.add("the new bytes", str(found["equal"]), equal=found["equal"])
    if not found["equal"]:
        report.failures.append("delta: the new bytes")
    rates = {
        "measured": 1e3 * saved / max(ms["pack"] + ms["check and apply"] - ms["copy"], 1e-6),
        "from passes": HBM_RATE * saved / nbytes / sum(HBM_PASSES.values()),
    }
    for name, rate in rates.items():
        report.add(f"it pays below a link of, {name}", f"{rate / 1e9:.0f} GB/s", rate=rate)


def wait_for_gpu() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def compare_ways(report: Report, bench: Any, rounds: int) -> None:
    """Add each way's seconds by stage, and its ratio to the classic way."""
    ways = {
        "classic": ("classic", "digest"),
        "whole": ("full", "digest"),
        "whole without digests": ("full", "off"),
        "delta": ("delta", "digest"),
        "delta without digests": ("delta", "off"),
        "wire": ("wire", "digest"),
    }
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for i in range(rounds + 1):
        for name, (way, verify) in ways.items():
            if i and not report.has_time():
                continue
            bench.bridge.verify = verify
            if way == "delta":
                bench.refit("delta")  # keeps the bytes from which the delta is taken
            bench.step()
            found = bench.cost(way)
            if i:  # the first round compiles
                seen[name].append(found)
    bench.bridge.verify = "digest"
    taken = {name: median(found["wall"] for found in each) for name, each in seen.items() if each}
    for name, seconds in taken.items():
        keys = [key for key in seen[name][0] if key.startswith("stage ")]
        stages = {key.removeprefix("stage "): median(found[key] for found in seen[name]) for key in keys}
        ratio = seconds / taken["classic"]
        text = f"{seconds:.4f} s, {ratio:.3f} of classic" + "".join(f", {k} {v:.4f}" for k, v in stages.items())
        nbytes = seen[name][0].get("nbytes", 0)
        report.add(name, text, seconds=seconds, of_classic=ratio, stages=stages, nbytes=nbytes)
    if {"whole", "whole without digests"} <= taken.keys():
        digests = 1 - taken["whole without digests"] / taken["whole"]
        ratio = taken["whole"] / taken["classic"]
        for name, value, goal in (("whole of classic", ratio, GOAL_FULL), ("digests of whole", digests, GOAL_DIGESTS)):
            report.add(name, f"{value:.3f}, {'reached' if value <= goal else 'missed'}: at most {goal}", value=value)


class ReleasingEnd:
    """A sending end whose messages are released at once. messages: how many were sent"""

    def __init__(self, capacity: int) -> None:
        self.buffers = [torch.empty(capacity, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
        self.messages = 0

    def has_free_buffer(self, within: float) -> bool:
        return True

    def acquire_buffer(self) -> Tensor:
        return self.buffers[self.messages % 2]

    def send(self, header: bytes, nbytes: int) -> None:
        self.messages += 1

    def close(self) -> None: ...


def show_stages(report: Report, bench: Any, rounds: int) -> None:
    """Add what the parts of a refit take alone."""
    from nemo_fp8rl.refit.manifest import Sources
    from nemo_fp8rl.refit.route_plan import plan
    from nemo_fp8rl.refit.sender.push import Link
    from nemo_fp8rl.refit.sender.weight_sender import WeightSender

    parts = list(bench.worker.refit.sender.parts.values())
    routes, capacities = plan(Sources([parts]), [parts], bench.cfg.nemo_fp8rl.refit.bucket_bytes)
    end = ReleasingEnd(capacities[0][0])
    sender = WeightSender(parts, bench.cfg.nemo_fp8rl.scale_format)
    cases = {
        "trainer alone, whole": {"digests": True},
        "trainer alone, whole, no digests": {"digests": False},
        "trainer alone, delta": {"digests": True, "delta": True, "keep": True},
        "trainer alone, delta, no digests": {"digests": False, "delta": True, "keep": True},
    }
    for name, options in cases.items():
        taken, stages = [], []
        for version in range(rounds + 1):
            bench.step()
            if options.get("delta") and sender.base_version < 0:
                sender.send(bench.worker.weights().for_refit(), 0, {(0, 0): Link(end, routes[0][0])}, keep=True)
            wait_for_gpu()
            begin, end.messages = time.perf_counter(), 0
            weights = bench.worker.weights().for_refit()
            made = sender.send(weights, version + 1, {(0, 0): Link(end, routes[0][0])}, **options)
            wait_for_gpu()
            taken.append(time.perf_counter() - begin)
            stages.append(made.seconds)
        middle = {key: median(each[key] for each in stages[1:]) for key in stages[0]}
        seconds = median(taken[1:])
        text = f"{seconds:.4f} s, {end.messages} messages, {len(routes[0][0])} pieces"
        text += "".join(f", {key} {value:.4f}" for key, value in middle.items())
        report.add(name, text, seconds=seconds, stages=middle, messages=end.messages)
    (future,) = bench.worker.refit.link_ends.values()
    real, count = future.result(), 16

    def send_messages() -> None:
        for _ in range(count):
            real.acquire_buffer()
            real.send(b"[]", 0)

    def messages() -> None:
        thread = threading.Thread(target=send_messages)
        thread.start()
        bench.core.rpc("bench_messages", count)
        thread.join()

    for name, call in {
        f"{count} empty messages and a call": messages,
        "a call of the engine": lambda: bench.core.rpc("nemo_fp8rl_domain"),
        "a wait for an idle GPU": wait_for_gpu,
    }.items():
        took = []
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            call()
            took.append(time.perf_counter() - begin)
        report.add(name, f"{1e3 * median(took[1:]):.3f} ms", ms=1e3 * median(took[1:]))


def show_auto(report: Report, bench: Any) -> None:
    from nemo_fp8rl.refit.full_or_delta import ModeChoice

    bench.bridge.choice = ModeChoice("auto")
    made = []
    for _ in range(6):
        bench.step()
        made.append("delta" if bench.bridge.refit().delta else "whole")
    times = ", ".join(f"{kind} {seconds:.4f} s" for kind, seconds in bench.bridge.choice.seconds.items())
    report.add("auto", f"{', '.join(made)}; {times}", made=made, seconds=bench.bridge.choice.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8, help="of Qwen3-8B's shape")
    arguments, report = start(parser, seconds=300)
    warnings.filterwarnings("ignore")
    rounds = 1 if arguments.dry_run else arguments.rounds
    context, initial = get_context("spawn"), (prepare_child, (not ON_GPU,))
    kernels = (("digests", measure_digests, show_digests), ("delta", measure_delta, show_delta))
    for name, measure, show in kernels:
        with report.section(name, 60.0 if ON_GPU else 600.0), ProcessPoolExecutor(1, context, *initial) as process:
            show(report, process.submit(measure, 3 * rounds).result())

    from benchmarks.measure import QWEN3_8B
    from benchmarks.refit import Bench

    gpus = torch.cuda.device_count() if ON_GPU else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    sizes = QWEN3_8B | {"num_hidden_layers": arguments.layers, "vocab_size": 2048} if ON_GPU else {"hidden_size": 256}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder) / "tiny", sizes, visible[1] if gpus > 1 else "")
        try:
            with report.section("refit", report.seconds_left() * 0.7):
                report.add("GPUs", str(min(gpus, 2)), gpus=gpus)
                compare_ways(report, bench, rounds)
            with report.section("stages", report.seconds_left()):
                show_stages(report, bench, rounds)
            with report.section("auto", report.seconds_left()):
                show_auto(report, bench)
        finally:
            bench.close()
    return report.close(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
