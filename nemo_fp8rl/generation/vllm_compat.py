"""All differences between the two supported versions of vLLM, 0.25 and 0.32; the rest of `generation/` asks for none.

vLLM is imported inside functions, because the engine sets vLLM's environment before the first import.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.vllm_version import NEWER, OLDER, installed_vllm, vllm_version
from nemo_fp8rl.config.generation_schema import VllmConfig


def survive_scan_of_llvmlite() -> None:
    """Let vLLM 0.32 scan llvmlite's library object.

    On a CPU vLLM 0.32 reads `__dict__` of every object of every imported module (triton_utils/dispatcher.py,
    _rebind_kernels). llvmlite's library object, which is there once numba is imported, takes `__dict__` for a symbol of
    LLVM and returns a function, on which vLLM fails. The object's cache of symbols is the place for a plain answer.
    """
    if vllm_version() == NEWER and (ffi := sys.modules.get("llvmlite.binding.ffi")):
        ffi.lib._fntab["__dict__"] = {}


def request_refusal_type() -> type[Exception]:
    """Return what vLLM raises for a request that it does not take; in 0.25 that is any ValueError."""
    from vllm import exceptions

    return getattr(exceptions, "VLLMClientError", ValueError)


def check_attention(cfg: VllmConfig) -> None:
    """Raise UserError for a backend or a window of the cache that the installed vLLM does not know."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if cfg.kv_window is not None and not has_kv_windows():
        raise UserError(refuse_window(cfg.kv_window))
    name = cfg.attention_backend  # None leaves the choice to vLLM
    if name and name.upper() not in AttentionBackendEnum.__members__:
        raise UserError(
            f"policy.generation.vllm_cfg.attention_backend={name}: vLLM {installed_vllm()} has none of this name; take "
            "TRITON_ATTN, FLASH_ATTN or FLASHINFER, or null for its own choice"
        )


def check_updates_in_flight() -> None:
    """Raise UserError where the installed vLLM cannot pause requests, or does not label tokens with their version."""
    from vllm.v1.engine.async_llm import AsyncLLM

    if not all(hasattr(AsyncLLM, name) for name in ("pause_generation", "resume_generation", "update_weight_version")):
        raise UserError(
            f"grpo.async_grpo.in_flight_weight_updates=true: the installed vLLM, {installed_vllm()}, does not tell "
            "from which weights a token was sampled; set it to false, or install vLLM {}.{}".format(*NEWER)
        )


def refuse_window(window: int) -> str:
    """Return the sentence about policy.generation.vllm_cfg.kv_window=window with the installed vLLM."""
    return (
        "policy.generation.vllm_cfg.kv_window={}: the installed vLLM, {}, does not free the cache between a prompt and "
        "a window; set kv_window=null, or install vLLM {}.{}".format(window, installed_vllm(), *NEWER)
    )


def has_kv_windows() -> bool:
    """True where the installed vLLM can free blocks between a prompt and a window, and tell attention of them."""
    from vllm.config import ModelConfig
    from vllm.v1 import kv_cache_interface
    from vllm.v1.attention.backend import AttentionBackend

    needs = (kv_cache_interface, "RSWASpec"), (AttentionBackend, "customize_spec"), (ModelConfig, "rswa_window")
    return all(hasattr(place, name) for place, name in needs)


def is_routing_by_experts() -> bool:
    """True where the method that computes experts also chooses them: with vLLM 0.25 on a CPU."""
    return vllm_version() == OLDER


def choose_experts(layer: Any, x: Tensor, router_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (weights, experts), both [tokens, k], by vLLM's own function; for `is_routing_by_experts`."""
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

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
    """True where vLLM itself returns the experts that it chose (EngineArgs' enable_return_routed_experts).

    That needs Triton, so it is False on a CPU.
    """
    from vllm.triton_utils import HAS_TRITON

    return HAS_TRITON


def check_routes_of_bf16_experts() -> None:
    """Raise UserError where nothing tells which bfloat16 experts were chosen: see `record_routes`."""
    if is_routing_by_experts():
        raise UserError(
            "policy.router_replay.enabled: on a CPU the installed vLLM, {}, does not tell which bfloat16 experts it "
            "chose; install vLLM {}.{}, or generate in FP8 in all layers".format(installed_vllm(), *NEWER)
        )


def record_routes(model: Any, recorder: Any) -> None:
    """Have every layer of experts call `recorder.capture(layer, chosen experts)`.

    In vLLM 0.32 routers choose on a CPU as well, and vLLM has a function for it. In 0.25 our experts have a hook
    (`EmulatedMoEMethod.capture`), and vLLM's experts have none.
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
    """Have the reload that follows pack the experts again.

    On a CPU vLLM 0.32 packs unquantized experts only while their method has no kernel, which is at the first load:
    after a reload the model would still compute with the first weights.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    if vllm_version() == NEWER and current_platform.is_cpu():
        for module in model.modules():
            if isinstance(method := getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
                method.moe_kernel = None


@contextmanager
def preserve_nonpersistent_buffers(model: Any) -> Iterator[None]:
    """Keep the model's non-persistent buffers through vLLM's layerwise reload.

    In 0.25 the reload overwrites buffers that no checkpoint has, such as the table of RoPE, with uninitialized memory
    (https://github.com/vllm-project/vllm/pull/44371).
    """
    buffers: list[tuple[Any, str, Tensor, Tensor]] = []
    if vllm_version() == OLDER:
        for module in model.modules():
            for name in module._non_persistent_buffers_set:
                buffer = module._buffers[name]
                if buffer is not None:
                    buffers.append((module, name, buffer, buffer.clone()))
    yield
    for module, name, buffer, content in buffers:
        module.register_buffer(name, buffer.copy_(content), persistent=False)


def forget_rotations() -> None:
    """Have the next model in this process build its own layers for RoPE.

    vLLM keeps them for the process by their settings, which do not say whether the engine is aligned.
    """
    from vllm.model_executor.layers import rotary_embedding

    rotary_embedding._ROPE_DICT.clear()


def end_engine(engine: Any) -> None:
    """End an engine in this process that is about to be dropped.

    vLLM 0.25 leaves the process groups of a dropped engine behind, and the next model finds them: a mixture of experts
    after a dense model finds none for its experts.
    """
    if vllm_version() == OLDER:
        engine.engine_core.shutdown()


def keys_and_values(kv_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return views of a layer's keys and values, both [pages, page_size, groups, d], of its cache on a GPU.

    vLLM 0.25 gives the cache as [pages, 2, page_size, groups, d], 0.32 as [pages, groups, page_size, 2 * d].
    """
    if kv_cache.dim() == 5:
        keys, values = kv_cache.unbind(1)
    else:
        keys, values = kv_cache.transpose(1, 2).split(head_dim, -1)
    return keys, values


def set_kv_scales(attention: Any, k_scale: Tensor, v_scale: Tensor, q_scale: Tensor) -> None:
    """Set the scales of an attention layer's FP8 cache, wherever its kernels read them.

    GPU kernels read buffers, which are written in place; other kernels take numbers, of which vLLM 0.32 keeps one copy
    more for keys and values, not for queries.
    """
    for x, scale in (("k", k_scale), ("v", v_scale), ("q", q_scale)):
        getattr(attention, f"_{x}_scale").copy_(scale)
        setattr(attention, f"_{x}_scale_float", float(scale))
        if vllm_version() == NEWER and x != "q":
            getattr(attention, f"_{x}_scale_cpu").copy_(scale)
    for product in ("bmm1_scale", "bmm2_scale"):  # FlashInfer makes these once, of the first scales
        if hasattr(attention.impl, product):
            setattr(attention.impl, product, None)
