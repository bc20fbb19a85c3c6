"""A window of the KV cache on one GPU: attention, trainer against engine, and rollouts.

    python benchmarks/gpu/kv_window.py [--seconds 240] [--json FILE] [--dry-run]

Attention of the shared operations with a window of 1,024 behind a prompt of 256, against all of 8,192 keys: time, the
same bits however a row is asked for, and gradients against those of float32. Then the loop on
the tiny model with a window of 2 tokens, aligned and with vLLM's attention for Triton: token_mult_prob_error and blocks
of the cache. Then rollouts of a random Qwen3 of 2 layers and hidden 4096 with and without a window, from caches that
hold a quarter of the dense sequences: tokens/s and blocks. What no time is left for is left out, and said. --dry-run
has the smallest sizes, on a CPU with Triton's interpreter.
"""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.align import ERROR_LIMIT, Measurement
from benchmarks.gpu.aligned_speed import fill, write_models
from benchmarks.gpu.report import DEVICE, ON_GPU, Report, equal_share, milliseconds, percent, relative_error, start

VLLM = "policy.generation.vllm_cfg"
LENGTH, PROMPT, WINDOW, SEQUENCES, D = (8192, 256, 1024, 64, 128) if ON_GPU else (208, 20, 40, 2, 32)
HEADS, GROUPS, ROUNDS = (32, 8, 10) if ON_GPU else (8, 2, 1)
CHOICES = (("vllm", None), ("none", "TRITON_ATTN"))
"""(nemo_fp8rl.align, vLLM's attention backend)."""
GRADIENT_LIMIT = 1e-2
LOOP_WINDOW, STEPS = 2, 6
ROLLOUT_PROMPT, ANSWER, ROLLOUT_WINDOW, COUNT, DENSE_SEQUENCES = (256, 2048, 256, 64, 16) if ON_GPU else (4, 4, 2, 2, 2)


def measure_attention(report: Report) -> None:
    """Add the lines of the kernel, and those of its gradients."""
    import torch
    import torch.nn.functional as F

    from nemo_fp8rl.ops.attention import attention
    from nemo_fp8rl.policy.layers.attention import hidden_keys, visible_keys
    from nemo_fp8rl.policy.layers.shared_ops.attention import SequenceAttention, attend_by_shared_kernel
    from nemo_fp8rl.policy.layers.shared_ops.attention_gradients import KvWindow

    generator, scale = torch.Generator(DEVICE).manual_seed(0), D**-0.5

    def values(length: int, heads: int) -> Any:
        return torch.randn(length, heads, D, generator=generator, device=DEVICE).bfloat16()

    def integers(*numbers: int) -> Any:
        return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)

    q, k, v = values(LENGTH, HEADS), values(LENGTH, GROUPS), values(LENGTH, GROUPS)
    page = 16
    pages = [t.unflatten(0, (-1, page)) for t in (k, v)]
    table = integers(*range(LENGTH // page))[None]

    def attend(ends: list[int], count: int, window: int | None) -> tuple[Any, Any]:
        """Attention of the last queries before each end."""
        queries = torch.cat([q[end - count : end] for end in ends])
        starts, n = integers(*range(0, count * len(ends) + 1, count)), len(ends)
        kept = () if window is None else (None, None, integers(*[PROMPT] * n), window)
        return attention(queries, *pages, table.expand(n, -1), starts, integers(*ends), scale, *kept)

    ends = [LENGTH - 3 * i for i in range(SEQUENCES)]
    expected = {window: attend([LENGTH], LENGTH, window)[0] for window in (None, WINDOW)}
    shares = {
        "a window of all keys": equal_share(attend([LENGTH], LENGTH, LENGTH)[0], expected[None]),
        "decode": equal_share(attend(ends, 1, WINDOW)[0], torch.cat([expected[WINDOW][e - 1 : e] for e in ends])),
        "chunk": equal_share(attend([LENGTH], 77, WINDOW)[0], expected[WINDOW][-77:]),
    }
    report.add(
        "the same bits as prefill, or as dense",
        ", ".join(f"{name} {percent(share)}" for name, share in shares.items()),
        equal=shares,
    )
    if any(share < 1 for share in shares.values()):
        report.failures.append("attention: rows depend on how they are asked for")
    for name, asked in (("prefill", ([LENGTH], LENGTH)), (f"decode of {SEQUENCES} sequences", (ends, 1))):
        dense, windowed = (
            milliseconds(partial(attend, *asked, window), ROUNDS, warm_up=2) for window in (None, WINDOW)
        )
        text = f"dense {dense:.3f} ms, window {windowed:.3f} ms, ratio {dense / windowed:.2f}"
        report.add(f"{name}, {LENGTH} keys", text, dense_ms=dense, window_ms=windowed)

    leaves, grad = [t.clone().requires_grad_() for t in (q, k, v)], values(LENGTH, HEADS)
    prompts = torch.tensor([PROMPT], device=DEVICE)
    kept = {"dense": None, "window": KvWindow(prompts, WINDOW)}
    outs = {n: SequenceAttention.apply(attend_by_shared_kernel, *leaves, 1, scale, None, w) for n, w in kept.items()}
    found = torch.autograd.grad(outs["window"], leaves, grad, retain_graph=True)
    by_head = [t.float().transpose(0, 1)[None] for t in leaves]
    mask = visible_keys(hidden_keys(LENGTH, prompts, WINDOW))[:, None]
    masked = F.scaled_dot_product_attention(*by_head, mask, enable_gqa=True)[0].transpose(0, 1)
    exact = torch.autograd.grad(masked, leaves, grad.float())
    errors = [relative_error(got, wanted) for got, wanted in zip(found, exact, strict=True)]
    ms = {
        name: milliseconds(partial(torch.autograd.grad, out, leaves, grad, retain_graph=True), ROUNDS)
        for name, out in outs.items()
    }
    text = f"dq, dk, dv {', '.join(f'{e:.1e}' for e in errors)} from float32's; "
    text += f"dense {ms['dense']:.3f} ms, window {ms['window']:.3f} ms"
    report.add(f"gradients, {LENGTH} keys", text, errors=errors, ms=ms)
    if max(errors) > GRADIENT_LIMIT:
        report.failures.append("attention: gradients are not those of float32")
    if ON_GPU:
        torch.cuda.empty_cache()  # for the engines


def measure_loop(report: Report, measurement: Measurement) -> None:
    """Add a line for each choice of attention: mismatch of trainer and engine, and blocks of the cache."""
    for align, backend in CHOICES:
        case = f"kv_window={LOOP_WINDOW}, align={align}" + (f", {backend}" if backend else "")
        if not report.has_time():
            continue
        further = [f"{VLLM}.kv_window={LOOP_WINDOW}"]
        further += [f"{VLLM}.attention_backend={backend}"] if backend and ON_GPU else []
        found = measurement.loop("bf16", False, align, *further)
        if isinstance(found, str):
            report.fail(case, RuntimeError(found))
            continue
        report.add(
            case,
            f"token_mult_prob_error {found['token_mult_prob_error']:.6f} (worst {found['worst_step']:.6f}), "
            f"bit-equal {percent(found['exact_logprob_fraction'])}",
            **found,
        )
        if align == "vllm" and found["token_mult_prob_error"] > ERROR_LIMIT:
            report.failures.append(f"{case} is not equal to the bit")


def rollout(folder: Path, align: str, backend: str | None, window: int | None) -> dict[str, float]:
    """Return tokens/s, and blocks of the cache, of an engine with random weights in this process.

    blocks:       of the whole cache
    peak_blocks:  of a request, at most; without a window those of all its tokens
    saved:        share of the blocks of all tokens that requests did not take
    """
    import torch

    from benchmarks.measure import seconds
    from benchmarks.train_step import RECIPE
    from nemo_fp8rl.config.recipe import load
    from nemo_fp8rl.generation.engine import VllmEngine
    from nemo_fp8rl.generation.engine_checks import one_sequence_gib
    from nemo_fp8rl.generation.interface import Sampling
    from nemo_fp8rl.hf.model_config import read_hf_config

    overrides = [
        f"policy.model_name={folder}/big",
        f"data.train.data_path={folder}/data.jsonl",
        "nemo_fp8rl.flow=bf16",
        f"nemo_fp8rl.align={align}",
        f"policy.max_total_sequence_length={ROLLOUT_PROMPT + ANSWER}",
        f"policy.generation.max_new_tokens={ANSWER}",
        f"{VLLM}.max_num_seqs={COUNT}",
        f"{VLLM}.gpu_memory_utilization=0.1",
    ]
    overrides += [f"{VLLM}.attention_backend={backend}"] if backend and ON_GPU else []
    overrides += [] if window is None else [f"{VLLM}.kv_window={window}"]
    cfg = load(RECIPE, overrides)
    gib = DENSE_SEQUENCES * one_sequence_gib(read_hf_config(cfg.policy.model_name), cfg)
    engine = VllmEngine()
    engine.setup(load(RECIPE, [*overrides, f"{VLLM}.kv_cache_memory_gib={gib}"]))
    engine.core.llm.apply_model(fill)  # type: ignore[attr-defined]
    engine.policy_version = engine.loaded_version = 0  # random weights instead of a refit
    sampling = Sampling(num_generations=1, max_new_tokens=ANSWER, temperature=1.0, stop_token_ids=(), logprobs=True)
    generator, produced = torch.Generator().manual_seed(0), list[int]()

    def generate(count: int) -> None:
        prompts = torch.randint(2, 60, (count, ROLLOUT_PROMPT), generator=generator).tolist()
        groups = engine.generate([tuple(p) for p in prompts], [*range(count)], sampling)
        produced.append(sum(len(c.token_ids) for group in groups for c in group))

    generate(1)
    time = seconds(lambda: generate(COUNT))
    manager = engine.core.llm.engine_core.engine_core.scheduler.kv_cache_manager  # type: ignore[attr-defined]
    blocks = manager.block_pool.num_gpu_blocks
    (group,) = manager.kv_cache_config.kv_cache_groups
    dense = -(-(ROLLOUT_PROMPT + ANSWER) // group.kv_cache_spec.block_size)
    peak, kept, of_all = engine.take_block_counts() if window is not None else (dense, dense, dense)
    engine.shutdown()
    return {
        "tokens_per_second": produced[-1] / time,
        "blocks": blocks,
        "peak_blocks": peak,
        "saved": 1 - kept / of_all,
    }


def measure_rollouts(report: Report, measurement: Measurement) -> None:
    """Add a line for each choice of attention: dense against a window."""
    folder = measurement.folder / "big"
    measurement.in_process(write_models, folder, 2 if ON_GPU else 1)
    for align, backend in CHOICES:
        found = {}
        for name, window in (("dense", None), (f"window of {ROLLOUT_WINDOW}", ROLLOUT_WINDOW)):
            case = f"{name}, align={align}" + (f", {backend}" if backend else "")
            if report.has_time():
                with report.guard(case):
                    row = found[name] = measurement.in_process(rollout, folder, align, backend, window)
                    text = f"{row['tokens_per_second']:.0f} tokens/s, at most {row['peak_blocks']:.0f} of "
                    text += f"{row['blocks']:.0f} blocks a request, saved {percent(row['saved'])}"
                    report.add(case, text, **row)
        if len(found) == 2:
            dense, windowed = (row["tokens_per_second"] for row in found.values())
            report.add(f"window over dense, align={align}", f"tokens/s {windowed / dense:.3f}", ratio=windowed / dense)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments, report = start(parser, 240)
    dry_run = arguments.dry_run
    with tempfile.TemporaryDirectory() as temporary:
        measurement = Measurement(report, Path(temporary), 1 if dry_run else STEPS, dry_run)
        with report.section("attention", report.seconds):
            if dry_run:
                from benchmarks.gpu.interpreted import prepare

                prepare()
            measure_attention(report)
        with report.section("the loop", report.seconds):
            measurement.make_model()
            measure_loop(report, measurement)
        with report.section(f"rollouts of {COUNT} sequences", report.seconds):
            measure_rollouts(report, measurement)
        return report.close(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
