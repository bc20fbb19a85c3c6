"""Check that trainer and engine store the same matrices in FP8: by names alone, before a refit moves anything.

The check is needed because vLLM silently casts a bfloat16 tensor to an FP8 weight without its scale.
"""

from collections.abc import Iterable, Mapping, Sequence

from nemo_fp8rl.fp8.layers import EXPERTS

BFLOAT16 = "set policy.generation.vllm_cfg.precision=bfloat16 and policy.megatron_cfg.fp8_cfg.enabled=false"


def describe_disagreement(
    engine_names: Iterable[str], trainer_names: Iterable[str], fused: Mapping[str, Sequence[str]]
) -> str:
    """Return a sentence on a module that only one of trainer and engine has in FP8; empty if there is none.

    engine_names:   the engine's parameters before vLLM processes them, by vLLM's names; a rank may have a part of them
    trainer_names:  the tensors that the trainer announces, by HF name
    fused:          vLLM's packed_modules_mapping
    """
    sent = _modules(trainer_names)
    for module, fp8 in _modules(engine_names).items():
        path, _, leaf = module.rpartition(".")
        for part in (f"{path}.{part}" for part in fused.get(leaf, (leaf,))):
            if fp8 != sent.get(part, False):
                return (
                    f"the engine holds {part} in FP8, and the trainer announces no scales for it"
                    if fp8
                    else f"the trainer announces scales for {part}, and the engine does not hold it in FP8"
                ) + f": NeMo RL's own workers cannot have this model with FP8 on the wire; {BFLOAT16}"
    return ""


def is_kv_scale(name: str) -> bool:
    """Return whether NeMo RL's name is that of a scale of an FP8 KV cache, or of the queries that read the cache."""
    return name.endswith((".k_scale", ".v_scale", ".q_scale"))


def _modules(tensors: Iterable[str]) -> dict[str, bool]:
    """Map each module of these tensors to whether it has FP8 scales; a layer's experts count as one module."""
    modules: dict[str, bool] = {}
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        if experts := EXPERTS.search(module):
            module = f"{module[: experts.start()]}.experts"
        modules[module] = modules.get(module, False) or leaf.endswith("_scale_inv")
    return modules
