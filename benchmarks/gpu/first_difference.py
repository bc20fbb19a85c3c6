"""The first layer and operation in which trainer and engine differ, on one prompt and its answer."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

RECIPE_OVERRIDES = ("policy.generation.vllm_cfg.enforce_eager=true",)
"""In a CUDA graph no hook would run."""
PROMPT_TOKENS, ANSWER_TOKENS = 40, 8
OPERATIONS = (
    ("input norm", "input_layernorm", "input_layernorm"),
    ("qkv", "self_attn.qkv_proj", "self_attention.linear_qkv"),
    ("q norm", "self_attn.q_norm", "self_attention.q_layernorm"),
    ("k norm", "self_attn.k_norm", "self_attention.k_layernorm"),
    ("rotation and attention", "self_attn.attn", "self_attention.core_attention"),
    ("output projection", "self_attn.o_proj", "self_attention.linear_proj"),
    ("norm before the MLP", "post_attention_layernorm", "pre_mlp_layernorm"),
    ("gate and up", "mlp.gate_up_proj", "mlp.linear_fc1"),
    ("activation", "mlp.act_fn", "mlp.activation_func"),
    ("down projection", "mlp.down_proj", "mlp.linear_fc2"),
    ("layer", "", ""),
)
"""(name, vLLM's module, Megatron's) in a decoder layer, in order; the output of "layer" is the residual stream."""


def rows_of(output: Any) -> Any:
    """Return a copy of a module's output as float32 [tokens, values], each row's values in ascending order.

    The two sides keep heads in other orders, so only the values of a row can be compared. The first of a tuple counts:
    linear layers return their bias beside the output, and vLLM's norms the sum.
    """
    first = output[0] if isinstance(output, tuple) else output
    return (first.detach().float() + 0.0).flatten(1).cpu().sort(-1).values  # a zero has no sign then


def stream_of(output: Any) -> Any:
    """Return `rows_of` the residual stream: of vLLM's decoder layer the rounded sum of its output and the residual."""
    first, second = output[:2]
    return rows_of(first if second is None else first + second)


class Outputs:
    """Outputs of modules by (place, operation), collected by hooks."""

    def __init__(self) -> None:
        self.parts: dict[tuple[str, str], list[Any]] = defaultdict(list)
        self.handles: list[Any] = []

    def hook(self, place: str, operation: str, module: Any, take: Callable[[Any], Any] = rows_of) -> None:
        if hasattr(module, "register_forward_hook"):

            def keep(_: Any, __: Any, output: Any) -> None:
                self.parts[place, operation].append(take(output))

            self.handles.append(module.register_forward_hook(keep))

    def of_layers(self, layers: Any, side: int) -> None:
        """side: 1 for vLLM's names, 2 for Megatron's."""
        for i, layer in enumerate(layers):
            for names in OPERATIONS:
                module = layer
                for part in filter(None, names[side].split(".")):
                    module = getattr(module, part, None)
                self.hook(f"layer {i}", names[0], module, rows_of if names[side] else stream_of)

    def close(self) -> dict[tuple[str, str], Any]:
        """Remove the hooks; return the rows of each operation, in order of the tokens."""
        import torch

        for handle in self.handles:
            handle.remove()
        return {key: torch.cat(parts) for key, parts in self.parts.items()}


def normed(output: Any) -> Any:
    """Return a copy of the first of a norm's results, [tokens, H], which vLLM returns with the sum."""
    first = output[0] if isinstance(output, tuple) else output
    return (first[:, 0] if first.dim() == 3 else first).detach().clone()


def find(overrides: list[str]) -> dict[str, Any]:
    """Compare trainer and engine of a recipe, in this process, on one prompt and its answer.

    Return the text of the first difference, or that there is none, and the share of equal rows of every operation.

    overrides:  of conf/tiny_cpu.yaml
    """
    import torch
    import torch.nn.functional as F

    from benchmarks.alignment import RECIPES, refit_engine, trainer
    from nemo_fp8rl.batch import Prompt, collate
    from nemo_fp8rl.config.recipe import load
    from nemo_fp8rl.generation.engine import VllmEngine
    from nemo_fp8rl.generation.interface import Sampling
    from nemo_fp8rl.ops.alignment import choose_alignment
    from nemo_fp8rl.ops.matmul import linear

    cfg = load(RECIPES / "tiny_cpu.yaml", [*overrides, *RECIPE_OVERRIDES])
    worker, engine = trainer(cfg), VllmEngine()
    engine.setup(cfg)
    refit_engine(worker, engine)
    ids = tuple(2 + (7 * i) % 13 for i in range(PROMPT_TOKENS))
    engines, norms = Outputs(), Outputs()

    def hook_engine(model: Any) -> Any:
        engines.hook("embedding", "", model.model.embed_tokens)
        engines.of_layers(model.model.layers, 1)
        norms.hook("final norm", "", model.model.norm, normed)
        return model

    (engine_model,) = engine.core.llm.apply_model(hook_engine)  # type: ignore[attr-defined]
    sampling = Sampling(num_generations=1, max_new_tokens=ANSWER_TOKENS, temperature=1.0, stop_token_ids=())
    ((answer,),) = engine.generate([ids], [0], sampling)
    engine_rows, engine_norm = engines.close(), norms.close()["final norm", ""]

    trainers, norms = Outputs(), Outputs()
    model = worker.model
    trainers.hook(
        "embedding", "", model.embedding.word_embeddings, lambda output: rows_of(output[0])
    )  # of one sequence
    trainers.of_layers(model.decoder.layers, 2)
    norms.hook("final norm", "", model.decoder.final_layernorm, normed)
    batch = collate([Prompt(0, "", "", ids)], [answer], 0)
    logprobs = worker.logprobs(batch)[0].cpu()
    logprobs = logprobs[batch.token_mask[0, -len(logprobs) :].bool()]
    trainer_rows, trainer_norm = trainers.close(), norms.close()["final norm", ""]

    with torch.no_grad():
        product = linear if choose_alignment(cfg.nemo_fp8rl) == "shared_ops" else F.linear
        trainer_logits = product(trainer_norm.to(model.head.dtype), model.head)
        engine_logits = engine_model.compute_logits(engine_norm)[:, : trainer_logits.size(1)]
    for name, ours, theirs in (
        ("final norm", trainer_norm, engine_norm),
        ("logits", trainer_logits, engine_logits),
        ("log-prob", logprobs[:, None], torch.tensor(answer.logprobs)[:, None]),
    ):
        trainer_rows[name, ""], engine_rows[name, ""] = ours.float().cpu(), theirs.float().cpu()
    engine.shutdown()
    worker.shutdown()
    return compare(trainer_rows, engine_rows)


def compare(trainer_rows: dict[tuple[str, str], Any], engine_rows: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """Return {first: text, equal_rows: {operation: share}} of the operations that both sides have."""
    places = ["embedding", *dict.fromkeys(place for place, _ in engine_rows if place.startswith("layer"))]
    order = [
        (place, name)
        for place in (*places, "final norm", "logits", "log-prob")
        for name in ([names[0] for names in OPERATIONS] if place.startswith("layer") else [""])
    ]
    shares, first = {}, "no difference"
    for key in order:
        if key not in trainer_rows or key not in engine_rows:
            continue
        ours, theirs = trainer_rows[key], engine_rows[key]
        count, name = min(len(ours), len(theirs)), ", ".join(filter(None, key))
        if ours[0].shape != theirs[0].shape:
            shares[name] = 0.0
            equal = [False] * count
        else:
            equal = (ours[:count] == theirs[:count]).all(-1).tolist()
            shares[name] = sum(equal) / count
        if first == "no difference" and not all(equal):
            row = equal.index(False)
            phase = "read" if row < PROMPT_TOKENS and key[0] != "log-prob" else "decoded"
            gap = float((ours[row] - theirs[row]).abs().max()) if ours[0].shape == theirs[0].shape else float("nan")
            first = (
                f"{name}: token {row}, which the engine {phase}, by up to {gap:.2g}; {shares[name]:.1%} of rows equal"
            )
    return {"first": first, "equal_rows": shares}
