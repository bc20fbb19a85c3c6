"""Checks that the trainer's and the engine's layouts split every quantized weight at borders of its blocks.

A rank quantizes its part of a weight. If the part begins inside a block of the whole weight, its blocks and its bytes
differ from those of another layout (docs/numerics.md). A size that ranks cannot share equally is reported first, in
FP8 or not (`head_division.py`).
"""

from collections.abc import Iterator

from nemo_fp8rl.commands.doctor.alignment.head_division import reasons_indivisible
from nemo_fp8rl.commands.doctor.finding import Finding
from nemo_fp8rl.commands.doctor.models.sizes import Weight
from nemo_fp8rl.commands.doctor.recipe_plan import ENGINE, TRAINER, Plan
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.fp8 import FP8
from nemo_fp8rl.hf.divisibility import Dimension, check_divides
from nemo_fp8rl.hf.fp8_layers import KERNEL_WIDTH

TOPIC = "alignment"
FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
LAST_ROWS = ("in_proj_b.weight", "in_proj_a.weight")
"""The last rows of Megatron's one matrix of a gated delta net: where the engine has them in bfloat16, as NeMo RL's
recipes do, nothing needs their blocks to be the same."""


def check_alignment(plan: Plan) -> Iterator[Finding]:
    uneven = [Finding("error", TOPIC, refusal) for refusal in reasons_indivisible(plan)]
    yield from uneven
    if uneven or not plan.quantizes_rollout:
        return
    found = [*_side(plan, "trainer"), *_side(plan, "engine"), *_heads(plan)]
    yield from found
    if not any(finding.level == "error" for finding in found):
        layouts = f"trainer TP {plan.tensor}, ETP {plan.expert_tensor}; engine TP {plan.engine_tensor}"
        text = f"every quantized weight is split at borders of its blocks of {_block(plan)} ({layouts})"
        yield Finding("ok", TOPIC, text)


def _heads(plan: Plan) -> Iterator[Finding]:
    """Yield a finding on NeMo RL's linear_qkv, which holds queries, key and value of a group, then the next group."""
    shape = plan.shape
    queries = [w for i in range(shape.layers) for w in shape.layer(i) if w.name.endswith("self_attn.q_proj.weight")]
    whole_blocks = shape.head_dim % _block(plan) == 0
    if plan.uses_package_workers or shape.kv_lora_rank or whole_blocks or not any(map(plan.is_fp8_in_trainer, queries)):
        return
    yield Finding(
        "warn",
        TOPIC,
        f"trainer: linear_qkv holds heads of {shape.head_dim} rows group by group, so its blocks of 128 are others "
        "than the engine's of q_proj, k_proj and v_proj; with nemo_fp8rl.workers=ours they are the same",
    )


def _block(plan: Plan) -> int:
    """Return the columns of a block."""
    return plan.format.line_block[1]


def _side(plan: Plan, side: str) -> Iterator[Finding]:
    reported = set()
    for layer in range(plan.shape.layers):
        for weight in plan.shape.layer(layer):
            kind = weight.name.partition(".layers.")[2].partition(".")[2]
            if kind not in reported and _is_fp8(plan, side, weight):
                reported.add(kind)
                yield from _weight(plan, side, weight, kind.removesuffix(".weight"))


def _is_fp8(plan: Plan, side: str, weight: Weight) -> bool:
    in_engine = plan.is_fp8_in_engine(weight)
    if side == "engine" or (weight.name.endswith(LAST_ROWS) and not in_engine):
        return in_engine
    return plan.is_fp8_in_trainer(weight)


def _weight(plan: Plan, side: str, weight: Weight, kind: str) -> Iterator[Finding]:
    (key, parts), block = _parts(plan, side, weight), _block(plan)
    size = weight.rows if weight.split == "rows" else weight.columns
    dimension = {"rows": "rows", "columns": "columns"}.get(weight.split, "")
    if parts > plan.shape.kv_heads and not plan.shape.kv_lora_rank:
        whole = (
            side == "trainer" and not plan.uses_package_workers
        )  # Megatron's attention.py then divides linear_qkv as one matrix
        if kind.endswith(("k_proj", "v_proj")) and (whole or side == "engine"):
            parts = 1 if whole else plan.shape.kv_heads  # heads are repeated and not split
        elif kind.endswith("q_proj") and whole:
            kind = "self_attn.linear_qkv"
            size = plan.shape.query_rows + 2 * plan.shape.kv_heads * plan.shape.head_dim
    fused = bool(weight.pieces) or (kind.endswith(FUSED) and (plan.shape.gated_mlp or not kind.endswith("up_proj")))
    for piece in dict.fromkeys(weight.pieces or (size,)) if weight.split != "none" and (parts > 1 or fused) else ():
        name = f"{dimension} of {kind}" if piece == size else f"{piece} of the {dimension} of {kind}"
        try:
            check_divides(key, parts, Dimension(name, piece, block))
        except UserError as error:
            yield Finding("error", TOPIC, f"{side}: {error} ({piece} / {parts} = {piece / parts:g})")
            return
        if piece % block:  # a fused matrix on one rank
            yield Finding(
                "error",
                TOPIC,
                f"{side}: {kind} has {piece} {dimension}, no multiple of {block}, and another matrix follows",
            )
            return
    for name, length in (("rows", weight.rows), ("columns", weight.columns)):
        if length % block:
            yield Finding(
                "warn" if plan.format is FP8 else "error",
                TOPIC,
                f"{side}: {kind} has {length} {name}, no multiple of {block}: its last blocks are ragged, which "
                f"{'quantizers pad in different ways' if plan.format is FP8 else 'kernels do not take'}",
            )
        of_rank = length // (parts if name == dimension else 1)
        if side == "engine" and plan.format.element == "e2m1" and not length % block and of_rank % KERNEL_WIDTH:
            yield Finding(
                "error",
                TOPIC,
                f"engine: {kind} has {of_rank} {name} in a process, and kernels of 4 bits take multiples of "
                f"{KERNEL_WIDTH}; lower {key}",
            )


def _parts(plan: Plan, side: str, weight: Weight) -> tuple[str, int]:
    """Return (key, value) of the number of ranks that share a weight."""
    if side == "engine":
        parts = plan.engine_expert_tensor if weight.of_expert else plan.engine_tensor
        return f"{ENGINE}.tensor_parallel_size", parts
    if weight.of_expert:
        return f"{TRAINER}.expert_tensor_parallel_size", plan.expert_tensor
    return f"{TRAINER}.tensor_model_parallel_size", plan.tensor
