"""Sizes of low-rank adapters: their parameters on a rank of the trainer, and their bytes in an engine and in a refit.

Of an adapter A [rank, K] and B [N, rank], tensor parallelism splits the side that it splits of the weight, and leaves
the other whole on every rank. NeMo RL's own trainer splits both, so for it this is an upper bound.
"""

from collections.abc import Iterable, Iterator

from nemo_fp8rl.commands.doctor.finding import Finding
from nemo_fp8rl.commands.doctor.memory.byte_widths import BF16
from nemo_fp8rl.commands.doctor.recipe_plan import Plan
from nemo_fp8rl.hf.adapters import FUSED_NAMES


def adapter_parameters(plan: Plan, stage: int) -> tuple[float, float]:
    """Return the parameters of adapters on a GPU of a pipeline stage: (dense part, experts)."""
    dense, experts = _sizes(plan, plan.stages[stage], plan.tensor, plan.expert_tensor)
    return dense, experts / plan.expert


def engine_adapters(plan: Plan) -> float:
    """Return the bytes of adapters on the fullest GPU of an engine; NeMo RL's own engines get the sum with the base."""
    if not plan.uses_package_workers:
        return 0.0
    layers = plan.shape.layers
    dense, experts = _sizes(plan, range(layers), plan.engine_tensor, plan.engine_expert_tensor)
    share = -(-layers // plan.engine_pipeline) / layers
    return BF16 * share * (dense + experts / plan.engine_expert)


def _sizes(plan: Plan, layers: Iterable[int], tensor: int, expert_tensor: int) -> tuple[float, float]:
    """Return the parameters of adapters of these layers on one rank of those that share a weight: (dense, experts).

    tensor, expert_tensor:  ranks that share a weight, and those that share one of an expert
    """
    dense = experts = 0.0
    for layer in layers:
        fused_before = set()
        for weight in filter(plan.gets_adapter, plan.shape.layer(layer)):
            above, _, leaf = weight.name.removesuffix(".weight").rpartition(".")
            fused = above, FUSED_NAMES.get(leaf, leaf)
            ranks = expert_tensor if weight.of_expert else tensor
            rows = weight.rows / (ranks if weight.split == "rows" else 1)
            columns = weight.columns / (ranks if weight.split == "columns" else 1)
            size = plan.peft.dim * weight.copies * (rows + (0 if fused in fused_before else columns))
            fused_before.add(fused)  # projections that trainer and engine fuse share one A (`hf/adapters.py`)
            dense, experts = (dense, experts + size) if weight.of_expert else (dense + size, experts)
    return dense, experts


def check_adapters(plan: Plan) -> Iterator[Finding]:
    """Say what the adapters are in parameters, and in the bytes of each refit after the first."""
    if not plan.peft.enabled:
        return
    values = sum(_sizes(plan, range(plan.shape.layers), 1, 1))
    words = f"{values / 1e6:,.1f} M parameters of adapters, {100 * values / plan.shape.parameters:.2g} % of the model's"
    if plan.uses_package_workers:
        yield Finding("ok", "adapters", f"{words}: a refit after the first carries {BF16 * values / 1e6:,.0f} MB")
    else:
        yield Finding("ok", "adapters", f"{words}; NeMo RL's own refits carry the whole model")
