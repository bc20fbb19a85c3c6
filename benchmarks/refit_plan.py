"""What does a refit of a large model take: pieces, messages and bytes of its real plan, host seconds, and a prediction.

    python benchmarks/refit_plan.py [--only TEXT] [--rounds 3] [--profile] [--json FILE]

The plan is a run's own, of the real shapes and layouts, without weights. Host seconds are what the code itself takes
for so many pieces: the same tensors with very small matrices, cut into as many pieces of experts, by the real sender
and the real load of an engine's rank, all ranks as threads of this process. They are seconds of the processor, for the
thread of the rank that takes longest, a median over the rounds after a first refit. With several engines they are of
the first.

The prediction is of a refit that is neither the first nor a delta. Trainer, link and engine work on different buckets
at once, so the slowest of the three decides, plus one bucket through the other two:

    trainer   host seconds + bytes of different pieces / QUANTIZE + the same / DIGEST
    link      bytes / rate of the link + messages * LATENCY
    engine    host seconds + bytes / COPY + bytes / DIGEST

QUANTIZE and COPY are rates of one H200, from the stages of benchmarks/results/refit_h200.json; the host seconds of its
few large pieces are in them, and in COPY the engine's waiting. DIGEST of that file is of torch's operations. A kernel
takes digests since then; no GPU has run it yet, and DIGEST_KERNEL is a quarter of the bytes a second that the
quantizer's kernel moved on that H200. `seen` is the prediction with that file's DIGEST. LINKS has the links, of each
rank. The formula's total for that file's own refit is printed beside the measured one: the stages are fitted, how they
overlap is not.
"""

import argparse
import cProfile
import json
import os
import pstats
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from rank_layouts import EXPERTS, Shape, engine_parts, layouts, model_config, parameters, shrink, trainer_parts
from rich.console import Console
from rich.table import Table

from nemo_fp8rl.common.machine import machine
from nemo_fp8rl.generation.weights.peer_source import PeerSource
from nemo_fp8rl.generation.weights.weight_store import VersionLoad
from nemo_fp8rl.hf.model_config import HfConfig
from nemo_fp8rl.policy.weights.layout import Layout
from nemo_fp8rl.policy.weights.refit_views import RefitViews
from nemo_fp8rl.refit.expert_stacks import stack_weights
from nemo_fp8rl.refit.manifest import Sources, TensorPart
from nemo_fp8rl.refit.message import Content
from nemo_fp8rl.refit.receiver.piece_receiver import IncomingLink
from nemo_fp8rl.refit.route_plan import BUCKETS, PIECE_BYTES, Links, align_up, plan
from nemo_fp8rl.refit.sender.push import Link
from nemo_fp8rl.refit.sender.weight_sender import WeightSender
from nemo_fp8rl.refit.transport.in_process import in_process_link

RESULTS = Path(__file__).parent / "results"
BUCKET_BYTES = 1 << 28
"""The default of nemo_fp8rl.refit.bucket_bytes."""
SHAPES = (
    Shape("meta-llama/Llama-3.1-8B", 8, 2, 4, tensor=4),
    Shape("Qwen/Qwen3-30B-A3B", 8, 8, 1, expert=8, engine_experts=True),
    Shape("Qwen/Qwen3-30B-A3B", 8, 2, 4, tensor=2, expert=8),
    Shape("Qwen/Qwen3-235B-A22B", 8, 8, 1, tensor=4, expert=8, engine_experts=True),
    Shape("Qwen/Qwen3-235B-A22B", 32, 8, 4, tensor=4, pipeline=2, expert=8, engine_experts=True),
    Shape("deepseek-ai/DeepSeek-V3", 64, 32, 1, pipeline=2, expert=32, engine_experts=True, only_experts=True),
)
LINKS = {"NVLink": 450e9, "InfiniBand 400 Gb/s": 50e9, "Ethernet 25 Gb/s": 3.125e9}
"""Bytes a second from one rank in one direction: NVLink of an H100, one network card for each GPU, one for each GPU."""
DIGEST_KERNEL = 1e12
"""Bytes a second: a quarter of 201 M bfloat16 weights and their FP8 bytes in 0.154 ms (docs/gpu.md)."""
SHARE_OF_LINK = 0.8
"""Of a link's rate that large copies reach."""
LATENCY = 20e-6
"""Seconds of a message: a word to the other side, and its answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="shapes whose model or layout has this text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print what the slowest sender's thread does")
    parser.add_argument("--json", type=Path, default=RESULTS / "refit_plan_cpu.json")
    arguments = parser.parse_args()
    # of ranks that are threads here and processes in a run: on two processors they spend most of their time on the lock
    # of Python
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rates = h200_rates()
    console, cases = Console(), []
    for shape in SHAPES:
        if arguments.only in f"{shape.model} {shape.label}":
            case = plan_of(shape) | host_seconds(shape, arguments.rounds, arguments.profile)
            kernels = rates | {"digest": DIGEST_KERNEL, "check": DIGEST_KERNEL}
            case["predicted"] = {name: predict(case, rate, kernels) for name, rate in LINKS.items()}
            case["predicted"]["seen"] = predict(case, LINKS["NVLink"], rates)
            cases.append(case)
            console.print(f"{shape.model}, {shape.label}: {json.dumps(case, default=str)}", soft_wrap=True)
    console.print(table(cases))
    check = check_on_h200(rates)
    console.print(
        f"the H200's refit of 1.56B: measured {check['measured']:.3f} s, predicted {check['predicted']:.3f} s"
    )
    report = {"machine": machine(), "torch": torch.__version__, "rates": rates, "check": check, "cases": cases}
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def plan_of(shape: Shape) -> dict[str, Any]:
    """Return what the real plan of all engines has: of the trainer's and the engine's rank with most of each."""
    hf = model_config(shape.model)
    holdings = [trainer_parts(layout, shape.only_experts) for layout in layouts(hf, shape)]
    stored = engine_parts(hf, shape)
    start = time.perf_counter()
    sources = Sources(holdings)
    domains = [[f"engine {engine}"] * shape.engine for engine in range(shape.engines)]
    plans = [plan(sources, stored, BUCKET_BYTES, engine, domains) for engine in range(shape.engines)]
    seconds = time.perf_counter() - start
    routes = [links.routes for links in plans]
    sent = [[route for routes_of in routes for route in routes_of[rank]] for rank in range(shape.ranks)]
    loaded = [[row[rank] for row in routes_of] for routes_of in routes for rank in range(shape.engine)]
    of_link = [messages(links) for links in plans]
    return {
        "model": shape.model,
        "layout": shape.label,
        "plan_seconds": seconds,
        "GB": sum(part.nbytes for part in {(p.name, p.region): p for rank in stored for p in rank}.values()) / 1e9,
        "sent": most(sent),
        "loaded": most(loaded),
        "messages_sent": max(sum(sum(counts[rank]) for counts in of_link) for rank in range(shape.ranks)),
        "messages_loaded": max(sum(row[rank] for row in counts) for counts in of_link for rank in range(shape.engine)),
    }


def most(ranks: list[list[tuple[TensorPart, ...]]]) -> dict[str, float]:
    """Return pieces, bytes, and bytes of different pieces of the rank that has most, and its links."""
    return {
        "links": max(sum(map(bool, routes)) for routes in ranks),
        "pieces": max(sum(map(len, routes)) for routes in ranks),
        "GB": max(sum(piece.nbytes for route in routes for piece in route) for routes in ranks) / 1e9,
        "different_GB": max(sum(piece.nbytes for piece in {*chain(*routes)}) for routes in ranks) / 1e9,
    }


def messages(links: Links) -> list[list[int]]:
    """Return the buckets that each link takes for a whole version, as `BucketWriter` fills them: [source][sink]."""
    return [
        [buckets(route, capacity) for route, capacity in zip(*rows, strict=True)]
        for rows in zip(links.routes, links.capacities, strict=True)
    ]


def buckets(route: tuple[TensorPart, ...], capacity: int) -> int:
    count = filled = 0
    for piece in route:
        if align_up(filled) + piece.nbytes > capacity:
            count, filled = count + 1, 0
        filled = align_up(filled) + piece.nbytes
    return count + 1 if route else 0


class EngineMemory(SimpleNamespace):
    """A stand-in for `WeightStore` in `VersionLoad`, over memory of the same layout: a tensor for each part."""

    @classmethod
    def of(cls, parts: list[TensorPart]) -> "EngineMemory":
        slots = {}
        for part in parts:
            content = Content.of(part, torch.zeros(part.nbytes, dtype=torch.uint8))
            slots[part.name] = SimpleNamespace(part=part, content=lambda content=content: content)
        peers = PeerSource(torch.device("cpu"))
        return cls(all_slots=slots, slots=slots, direct_names=frozenset(slots), version=0, for_peers=peers)

    def load(self, links: list[IncomingLink], version: int) -> None:
        loading = VersionLoad(self, links, version, True, True)  # type: ignore[arg-type]
        assert not list(loading.for_vllm())
        if loading.error is not None:
            raise loading.error
        loading.checks.finish()


def host_seconds(shape: Shape, rounds: int, profile: bool) -> dict[str, float]:
    """Return processor seconds of the sender's and of the engine's thread that takes longest, of the small copy."""
    hf = shrink(model_config(shape.model), shape)
    ranks = layouts(hf, shape)
    holdings = [trainer_parts(layout, shape.only_experts) for layout in ranks]
    stored, sources = engine_parts(hf, shape), Sources(holdings)
    routes, capacities = small_plan(shape, hf, sources, stored)
    senders = [WeightSender(parts, "pow2") for parts in holdings]
    memory = [EngineMemory.of(parts) for parts in stored]
    outgoing: list[dict[tuple[int, int], Link]] = [{} for _ in ranks]
    incoming: list[list[IncomingLink]] = [[] for _ in stored]
    for source, row in enumerate(routes):
        for sink, route in enumerate(row):
            if route:
                ends = in_process_link(capacities[source][sink], 600.0)
                outgoing[source][0, sink] = Link(ends[0], route)
                incoming[sink].append(IncomingLink(ends[1], route))
    views = [sent_views(layout, shape) for layout in ranks]
    sent, loaded = [], []
    for version in range(1, rounds + 2):
        with ThreadPoolExecutor(len(ranks) + len(stored)) as threads:
            sends = [
                threads.submit(timed, send, senders[rank], views[rank], outgoing[rank], version)
                for rank in range(len(ranks))
                if outgoing[rank]
            ]
            loads = [threads.submit(timed, memory[rank].load, links, version) for rank, links in enumerate(incoming)]
            sent.append(max(wait.result() for wait in sends))
            loaded.append(max(wait.result() for wait in loads))
    if profile:
        most_pieces = max(range(len(ranks)), key=lambda rank: sum(map(len, routes[rank])))
        profile_sender(senders[most_pieces], views[most_pieces], [route for route in routes[most_pieces] if route])
    return {"host_sent": median(sent[1:]), "host_loaded": median(loaded[1:])}


def small_plan(shape: Shape, small: HfConfig, sources: Sources, stored: list[list[TensorPart]]) -> Links:
    """Return the routes of the small model, with as many pieces of each MLP's matrices as the real one has."""
    hf = model_config(shape.model)
    share = small.hidden_size * small.intermediate_size / (hf.hidden_size * hf.intermediate_size)
    routes = sources.routes(stored, int(PIECE_BYTES * share))
    sizes = [[[align_up(piece.nbytes) for piece in route] for route in row] for row in routes]
    return Links(routes, [[max([*of_link, sum(of_link) // BUCKETS], default=0) for of_link in row] for row in sizes])


Views = Callable[[], list[tuple[str, Any]]]
"""Returns a rank's weights by HF names, as at every refit."""


def sent_views(layout: Layout, shape: Shape) -> Views:
    views = RefitViews(layout, parameters(layout, "cpu"))
    if not shape.only_experts:
        return views.get
    return lambda: [(name, part) for name, part in views.get() if EXPERTS in name]


def send(sender: WeightSender, views: Views, links: dict[tuple[int, int], Link], version: int) -> None:
    sender.send(stack_weights(views(), sender.stack_sizes), version, links)


def timed(call: Callable[..., Any], *arguments: Any) -> float:
    start = time.thread_time()
    call(*arguments)
    return time.thread_time() - start


def profile_sender(sender: WeightSender, views: Views, routes: list[Any]) -> None:
    """Print the profile of one rank that sends to engines that only read."""

    def drain(end: Any) -> None:
        while not json.loads(end.receive()[0])[3]:
            end.release()
        end.release()

    ends = [in_process_link(1 << 24, 600.0) for _ in routes]
    links = {(0, i): Link(pair[0], route) for i, (pair, route) in enumerate(zip(ends, routes, strict=True))}
    with ThreadPoolExecutor(len(ends)) as threads:
        for _, end in ends:
            threads.submit(drain, end)
        send(sender, views, links, 98)
        for _, end in ends:
            threads.submit(drain, end)
        profiler = cProfile.Profile(time.thread_time)
        profiler.runcall(send, sender, views, links, 99)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def h200_rates() -> dict[str, float]:
    """Return bytes a second of the stages that one H200 had in its refits by CUDA IPC."""
    stages = json.loads((RESULTS / "refit_h200.json").read_text())["seconds"]["full"]
    nbytes = stages["nbytes"]
    copy = stages["stage load"] - stages["stage verify"]
    return {
        "quantize": nbytes / stages["stage quantize"],
        "digest": nbytes / stages["stage encode"],
        "check": nbytes / stages["stage verify"],
        "copy": nbytes / copy,
    }


def predict(case: dict[str, Any], link: float, rates: dict[str, float]) -> dict[str, float]:
    """Return seconds of trainer, link and engine, and of all together."""
    sent, loaded = case["sent"]["GB"] * 1e9, case["loaded"]["GB"] * 1e9
    quantized = case["sent"]["different_GB"] * 1e9
    stages = {
        "trainer": case["host_sent"] + quantized / rates["quantize"] + quantized / rates["digest"],
        "link": max(sent, loaded) / (link * SHARE_OF_LINK) + case["messages_sent"] * LATENCY,
        "engine": case["host_loaded"] + loaded / rates["copy"] + loaded / rates["check"],
    }
    first = sum(stages.values()) / max(1, case["messages_loaded"])
    return stages | {"total": max(stages.values()) + first}


def check_on_h200(rates: dict[str, float]) -> dict[str, float]:
    """Return the seconds of the H200's own refit, and what `predict` says of it."""
    measured = json.loads((RESULTS / "refit_h200.json").read_text())["seconds"]["full"]
    size = {"GB": measured["nbytes"] / 1e9, "different_GB": measured["nbytes"] / 1e9}
    case = {"sent": size, "loaded": size, "host_sent": 0.0, "host_loaded": 0.0, "messages_sent": 16}
    predicted = predict(case | {"messages_loaded": 16}, LINKS["NVLink"] * 10, rates)["total"]
    return {"measured": measured["wall"], "predicted": predicted, "error": predicted / measured["wall"] - 1}


def table(cases: list[dict[str, Any]]) -> Table:
    columns = ("model", "layout", "GB", "pieces", "messages", "GB of a rank", "plan s", "host s, trainer", "engine")
    found = Table(*columns, *LINKS, "as seen")
    for case in cases:
        found.add_row(
            case["model"].split("/")[1],
            case["layout"],
            f"{case['GB']:.1f}",
            f"{case['sent']['pieces']} / {case['loaded']['pieces']}",
            f"{case['messages_sent']} / {case['messages_loaded']}",
            f"{case['sent']['GB']:.2f} / {case['loaded']['GB']:.2f}",
            f"{case['plan_seconds']:.2f}",
            f"{case['host_sent']:.3f}",
            f"{case['host_loaded']:.3f}",
            *(f"{predicted['total']:.2f}" for predicted in case["predicted"].values()),
        )
    return found


if __name__ == "__main__":
    main()
