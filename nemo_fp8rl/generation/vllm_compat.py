"""All that differs between the versions of vLLM that `generation/` runs on, 0.25 to 0.32; the rest of it does not ask.

vLLM is imported inside functions: the engine sets vLLM's environment before.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.vllm_version import installed_vllm, vllm_version


def survive_scan_of_llvmlite() -> None:
    """vLLM on CPU, since 0.31, asks every object of every loaded module for its `__dict__` (triton_utils/dispatcher.py,
    _rebind_kernels). llvmlite's library object, there once numba is imported, takes that for a symbol of LLVM and
    answers with a function, on which vLLM fails; its cache of symbols is the place to give a plain answer.
    """
    if vllm_version() >= (0, 31) and (ffi := sys.modules.get("llvmlite.binding.ffi")):
        ffi.lib._fntab["__dict__"] = {}


def request_refusal_type() -> type[Exception]:
    """What vLLM raises of a request that it does not take; in 0.25 any ValueError."""
    from vllm import exceptions

    return getattr(exceptions, "VLLMClientError", ValueError)


def check_attention_backend(name: str | None) -> None:
    """Raise UserError for a name that the installed vLLM does not know; None is its own choice."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if name and name.upper() not in AttentionBackendEnum.__members__:
        raise UserError(
            f"policy.generation.vllm_cfg.attention_backend={name}: vLLM {installed_vllm()} has none of this name; take "
            "TRITON_ATTN, FLASH_ATTN or FLASHINFER, or null for its own choice"
        )


def is_routing_by_experts() -> bool:
    """Whether vLLM on CPU leaves the choice of experts to what computes them, as it did before 0.30."""
    return vllm_version() < (0, 30)


def choose_experts(layer: Any, x: Tensor, router_logits: Tensor) -> tuple[Tensor, Tensor]:
    """(weights, experts), both [tokens, k], by vLLM's own function; for `is_routing_by_experts`.

    It is in the module cpu_fused_moe up to 0.27, then in experts.cpu_moe.
    """
    if vllm_version() < (0, 28):
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts
    else:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import select_experts
    return select_experts(
        hidden_states=x,
        router_logits=router_logits,
        top_k=layer.top_k,
        use_grouped_topk=layer.use_grouped_topk,
        renormalize=layer.renormalize,
        topk_group=layer.topk_group,
        num_expert_group=layer.num_expert_group,
        custom_routing_function=layer.custom_routing_function,
        scoring_func=layer.scoring_func,
        routed_scaling_factor=layer.routed_scaling_factor,
        e_score_correction_bias=layer.e_score_correction_bias,
    )


def has_route_output() -> bool:
    """Whether vLLM itself hands out the experts that it chose (EngineArgs' enable_return_routed_experts): where it has
    Triton, so not on a CPU.
    """
    from vllm.triton_utils import HAS_TRITON

    return HAS_TRITON


def check_routes_of_bf16_experts() -> None:
    """Raise UserError where nothing says which bfloat16 experts were chosen: see `record_routes`."""
    if is_routing_by_experts():
        raise UserError(
            "policy.router_replay.enabled: which bfloat16 experts vLLM chose on a CPU it tells since 0.30, and the "
            f"installed one is {installed_vllm()}; upgrade it, or generate in FP8 in all layers"
        )


def record_routes(model: Any, recorder: Any) -> None:
    """Have every layer of experts call `recorder.capture(layer, chosen experts)`.

    Since 0.30 vLLM's routers choose on CPU, too, and it has a function for it. Before, ours have a place for the call
    (`EmulatedFp8MoEMethod.capture`) and vLLM's have none.
    """
    if not is_routing_by_experts():
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        bind_routed_experts_capturer(model, recorder)
        return
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    for module in model.modules():
        if isinstance(module, MoERunner):
            method: Any = module.routed_experts.quant_method
            assert hasattr(method, "capture"), "check_routes_of_bf16_experts"
            method.capture = partial(recorder.capture, module.layer_id)


def forget_packed_experts(model: Any) -> None:
    """Have a reload, before which this is called, pack the experts anew. vLLM on CPU, since 0.28, packs unquantized
    experts only when their method has no kernel yet, which is at the first load: after a reload the model would go on
    with the first weights.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    if vllm_version() >= (0, 28) and current_platform.is_cpu():
        for module in model.modules():
            if isinstance(method := getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
                method.moe_kernel = None


@contextmanager
def preserve_nonpersistent_buffers(model: Any) -> Iterator[None]:
    """Keep the model's own buffers through vLLM's layerwise reload: before 0.26 that overwrites buffers that no
    checkpoint has, such as the table of RoPE, with uninitialized memory
    (https://github.com/vllm-project/vllm/pull/44371).
    """
    own: list[tuple[Any, str, Tensor, Tensor]] = []
    if vllm_version() < (0, 26):
        for module in model.modules():
            for name in module._non_persistent_buffers_set:
                buffer = module._buffers[name]
                if buffer is not None:
                    own.append((module, name, buffer, buffer.clone()))
    yield
    for module, name, buffer, content in own:
        module.register_buffer(name, buffer.copy_(content), persistent=False)


def end_engine(engine: Any) -> None:
    """End an engine in this process, which is about to be dropped. Before 0.31 vLLM leaves the process groups behind,
    and the next model finds those of this one: a mixture after a dense model none for its experts.
    """
    if vllm_version() < (0, 31):
        engine.engine_core.shutdown()


def set_kv_scales(attention: Any, k_scale: Tensor, v_scale: Tensor, q_scale: Tensor) -> None:
    """Set the scales in the buffers that GPU kernels read, in place, and in the copies for kernels that take numbers,
    of which one is there since 0.26, not of queries.
    """
    for x, scale in (("k", k_scale), ("v", v_scale), ("q", q_scale)):
        getattr(attention, f"_{x}_scale").copy_(scale)
        setattr(attention, f"_{x}_scale_float", float(scale))
        if vllm_version() >= (0, 26) and x != "q":
            getattr(attention, f"_{x}_scale_cpu").copy_(scale)
    for product in ("bmm1_scale", "bmm2_scale"):  # FlashInfer's, which it makes of the first scales once
        if hasattr(attention.impl, product):
            setattr(attention.impl, product, None)
