"""One vLLM engine in this process: generate, and take a refit. The driver's side is `vllm.py`."""

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.batch import Completion
from nemo_fp8rl.config import Config
from nemo_fp8rl.errors import UserError
from nemo_fp8rl.generation.base import Sampling
from nemo_fp8rl.generation.vllm_plugin import quantization_config
from nemo_fp8rl.hf.config import engine_fp8_layers, read_hf_config
from nemo_fp8rl.refit.bridge import Acknowledgement
from nemo_fp8rl.refit.manifest import RefitError, Update, joined
from nemo_fp8rl.refit.transport import serialized

WORKER_EXTENSION = "nemo_fp8rl.generation.vllm_worker.RefitWorkerExtension"
ENVIRONMENT = {  # read by vLLM at import; what the user has set wins
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # leave the process's CPU affinity alone
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # else the first generate compiles a helper for seconds
    "HF_HUB_OFFLINE": "1",
}


class VllmEngine:
    """Construct, then `setup`. Starts with dummy weights: it refuses to generate before its first refit."""

    def setup(self, cfg: Config, load_format: str = "dummy") -> None:
        """`load_format="auto"` reads the weights of policy.model_name from disk instead of waiting for a refit."""
        if cfg.fp8_kv_cache:
            _check_fp8_kv_kernel()
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core in this process: a refit is not pickled
        vllm_cfg = cfg.policy.generation.vllm_cfg
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # "Triton not available", on every CPU
        from vllm import LLM

        _survive_scan_of_llvmlite()
        cache_gib = vllm_cfg.kv_cache_memory_gib
        overrides = {}
        if fp8_layers := engine_fp8_layers(read_hf_config(cfg.policy.model_name), cfg):
            overrides["quantization_config"] = quantization_config(cfg.nemo_fp8rl.scale_format, fp8_layers)
        self.policy_version = -1 if load_format == "dummy" else 0
        self.max_model_len = vllm_cfg.max_model_len
        self.llm = LLM(
            model=cfg.policy.model_name,
            dtype=cfg.policy.precision,
            hf_overrides=overrides,
            load_format=load_format,
            skip_tokenizer_init=True,
            worker_extension_cls=WORKER_EXTENSION,
            max_model_len=vllm_cfg.max_model_len,
            max_num_seqs=vllm_cfg.max_num_seqs,
            kv_cache_dtype=vllm_cfg.kv_cache_dtype,
            enforce_eager=vllm_cfg.enforce_eager,
            gpu_memory_utilization=vllm_cfg.gpu_memory_utilization,
            kv_cache_memory_bytes=None if cache_gib is None else int(cache_gib * 2**30),
            logprobs_mode="processed_logprobs",  # of the distribution really sampled from
            generation_config="vllm",  # not the checkpoint's sampling defaults
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=cfg.grpo.seed,
        )
        self.records_routes = cfg.policy.router_replay.enabled
        if self.records_routes:
            self.llm.collective_rpc("nemo_fp8rl_record_routes")

    def generate(
        self, prompts: Sequence[tuple[int, ...]], seeds: Sequence[int], sampling: Sampling
    ) -> list[list[Completion]]:
        """Completions of each prompt, in order. A prompt and its answer end where the context does."""
        from vllm import SamplingParams

        if self.policy_version < 0:
            raise RefitError("this engine has not received weights yet: refit before the first generation")
        params = [
            SamplingParams(
                n=sampling.num_generations,
                temperature=sampling.temperature,
                max_tokens=min(sampling.max_new_tokens, self.max_model_len - len(prompt)),
                logprobs=0 if sampling.logprobs else None,
                stop_token_ids=list(sampling.stop_token_ids),
                seed=seed,
                detokenize=False,
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        routes: dict[str, Tensor] = {}
        wanted = self.records_routes and sampling.logprobs
        if self.records_routes:
            (routes,) = self.llm.collective_rpc("nemo_fp8rl_take_routes", args=(wanted,))
        return [
            [
                self._completion(sample, sampling.logprobs, routes[_request_id(output, sample)] if wanted else None)
                for sample in output.outputs
            ]
            for output in outputs
        ]

    def load_update(self, *parts: Update | bytes) -> Acknowledgement:
        """Verify and apply a refit, of one part a trainer rank; drop the prefix cache, answer with the version."""
        received = [serialized.unpack(part) if isinstance(part, bytes) else part for part in parts]
        self.policy_version = -1  # nothing is generated from mixed weights, whatever fails below
        update = joined(received)
        del received
        (version,) = set(self.llm.collective_rpc("nemo_fp8rl_load", args=(update,)))
        if not self.llm.reset_prefix_cache():
            raise RefitError(f"refit {version}: the engine kept its prefix cache, which holds the old weights' keys")
        self.policy_version = version
        return Acknowledgement(version, update.nbytes)

    def shutdown(self) -> None:
        self.__dict__.pop("llm", None)  # absent when setup failed

    def _completion(self, sample: Any, logprobs: bool, routes: Tensor | None) -> Completion:
        token_ids = tuple(sample.token_ids)
        if sample.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"the engine ended a completion by {sample.finish_reason!r}")
        entries = zip(sample.logprobs, token_ids, strict=True) if logprobs else ()
        per_token = [entry[token].logprob for entry, token in entries]
        return Completion(token_ids, tuple(per_token), sample.finish_reason, self.policy_version, routes)


def _check_fp8_kv_kernel() -> None:
    """Raise UserError on a CPU that vLLM's FP8 KV cache does not run on (cpu_attn.py, _get_attn_isa)."""
    if not (torch.cuda.is_available() or torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        raise UserError(
            "policy.generation.vllm_cfg.kv_cache_dtype=fp8: vLLM's FP8 KV cache needs a CPU with AVX-512 or AMX; set "
            "kv_cache_dtype=auto"
        )


def _request_id(output: Any, sample: Any) -> str:
    """vLLM's, of one of the samples of a prompt (`ParentRequest.get_child_info`)."""
    return f"{sample.index}_{output.request_id}" if len(output.outputs) > 1 else output.request_id


def _survive_scan_of_llvmlite() -> None:
    """vLLM 0.32 on CPU asks every object of every loaded module for its `__dict__` (triton_utils/dispatcher.py,
    _rebind_kernels). llvmlite's library object, there once numba is imported, takes that for a symbol of LLVM and
    answers with a function, on which vLLM fails; its cache of symbols is the place to give a plain answer.
    """
    if ffi := sys.modules.get("llvmlite.binding.ffi"):
        ffi.lib._fntab["__dict__"] = {}
