"""Whether trainer and engine hold the same matrices in FP8: by names alone, before a refit moves anything.

vLLM casts what comes as bfloat16 to an FP8 weight without its scale, and says nothing.
"""

from collections.abc import Iterable, Mapping, Sequence

from nemo_fp8rl.fp8.layers import EXPERTS

BFLOAT16 = "set policy.generation.vllm_cfg.precision=bfloat16 and policy.megatron_cfg.fp8_cfg.enabled=false"


def disagreement(held: Iterable[str], announced: Iterable[str], fused: Mapping[str, Sequence[str]]) -> str:
    """A module that one has in FP8 and the other has not, in a sentence; empty if there is none.

    held: the engine's parameters as a checkpoint fills them, by vLLM's names; a rank may hold a part of the model.
    announced: the trainer's tensors, by HF's. fused: vLLM's packed_modules_mapping.
    """
    sent = _modules(announced)
    for module, fp8 in _modules(held).items():
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
    """Whether NeMo RL's name is that of a scale of an FP8 KV cache, or of the queries that read it."""
    return name.endswith((".k_scale", ".v_scale", ".q_scale"))


def _modules(tensors: Iterable[str]) -> dict[str, bool]:
    """The modules of these tensors, a layer's experts as one, and whether there are scales among what they hold."""
    modules: dict[str, bool] = {}
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        if experts := EXPERTS.search(module):
            module = f"{module[: experts.start()]}.experts"
        modules[module] = modules.get(module, False) or leaf.endswith("_scale_inv")
    return modules
