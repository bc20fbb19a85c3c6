"""Speed with and without alignment: a training step and a log-prob pass, and rollouts of engines that take turns."""

from pathlib import Path
from statistics import median
from typing import Any

PROMPT, ANSWER = 64, 64


def write_models(folder: Path, layers: int) -> dict[str, Any]:
    """Write folder/big, a random Qwen3 (hidden 4096 on a GPU), and the tiny data; return the model's sizes."""
    from benchmarks.train_step import ON_GPU, SIZES
    from nemo_fp8rl.commands.tiny_model import make_tiny, write_model

    make_tiny(folder, "add")
    sizes = SIZES | {"num_hidden_layers": layers}
    write_model(folder / "big", 0, "qwen3", "cuda" if ON_GPU else "cpu", **sizes)
    return sizes


def train_speed(folder: Path, flow: str, align: str, sequences: int, length: int, rounds: int) -> dict[str, Any]:
    """Return what benchmarks/train_step.py measures, in this process, for random tokens."""
    import torch

    from benchmarks.train_step import SIZES, measure
    from nemo_fp8rl.batch import RolloutBatch

    shape = sequences, length
    batch = RolloutBatch(
        input_ids=torch.randint(2, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(0)),
        input_lengths=torch.full(shape[:1], length),
        token_mask=torch.ones(shape),
        sample_mask=torch.ones(sequences),
        generation_logprobs=torch.zeros(shape),
    )
    return measure(folder, flow, False, batch, rounds, align)


def fill(model: Any) -> None:
    """Give every weight random values of a usual size."""
    import torch

    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, device=parameter.device)
        if name.endswith("scale_inv"):
            values = torch.full_like(values, 2.0**-6)
        elif parameter.dim() == 1:
            values = torch.ones_like(values)
        elif parameter.element_size() > 1:
            values *= 2.0**-6
        parameter.data.copy_(values)


def rollout_speed(folder: Path, flow: str, counts: list[int], answer: int, rounds: int) -> dict[str, dict[int, float]]:
    """Return tokens/s by alignment and number of sequences.

    Both engines are in this process, with random weights, and answer new prompts in turns.

    answer:  tokens of an answer
    """
    import torch

    from benchmarks.measure import seconds
    from benchmarks.train_step import ON_GPU, RECIPE
    from nemo_fp8rl.config.recipe import load
    from nemo_fp8rl.generation.engine import VllmEngine
    from nemo_fp8rl.generation.interface import Sampling

    vllm = "policy.generation.vllm_cfg"
    overrides = [
        f"policy.model_name={folder}/big",
        f"data.train.data_path={folder}/data.jsonl",
        f"nemo_fp8rl.flow={flow}",
        f"policy.max_total_sequence_length={PROMPT + answer}",
        f"policy.generation.max_new_tokens={answer}",
        f"{vllm}.max_num_seqs={max(counts)}",
        f"{vllm}.kv_cache_memory_gib={4 if ON_GPU else 0.25}",
        f"{vllm}.gpu_memory_utilization=0.1",
    ]
    engines = {}
    for align in ("vllm", "none"):
        engine = engines[align] = VllmEngine()
        engine.setup(load(RECIPE, [*overrides, f"nemo_fp8rl.align={align}"]))
        engine.core.llm.apply_model(fill)  # type: ignore[attr-defined]
        engine.policy_version = engine.loaded_version = 0  # random weights instead of a refit
    sampling = Sampling(num_generations=1, max_new_tokens=answer, temperature=1.0, stop_token_ids=(), logprobs=True)
    generator = torch.Generator().manual_seed(0)
    produced: list[int] = []

    def generate(engine: VllmEngine, count: int) -> None:
        """With new prompts, which no prefix cache has."""
        prompts = torch.randint(2, 60, (count, PROMPT), generator=generator).tolist()
        groups = engine.generate([tuple(p) for p in prompts], [*range(count)], sampling)
        produced.append(sum(len(c.token_ids) for group in groups for c in group))

    taken: dict[tuple[str, int], list[float]] = {(align, n): [] for n in counts for align in engines}
    for engine in engines.values():
        generate(engine, min(counts))
    for _ in range(rounds):
        for (align, count), speeds in taken.items():
            time = seconds(lambda align=align, count=count: generate(engines[align], count))
            speeds.append(produced[-1] / time)
    for engine in engines.values():
        engine.shutdown()
    return {align: {n: median(taken[align, n]) for n in counts} for align in engines}
