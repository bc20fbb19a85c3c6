"""Build a policy, its engines, and the bridge between them, from a recipe; choose how the weights travel."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec

from nemo_fp8rl.algorithms.gates import explained_mismatch
from nemo_fp8rl.common.errors import UserError, single_line
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.generation.engine_pool import EnginePool
from nemo_fp8rl.generation.interface import EngineDescription
from nemo_fp8rl.hf.shared_operations import differing_operations
from nemo_fp8rl.ops.alignment import Alignment, choose_alignment
from nemo_fp8rl.policy.interface import PolicyDescription
from nemo_fp8rl.policy.rank_group import MegatronPolicy, deaths_as_user_errors
from nemo_fp8rl.refit.bridge import RefitBridge
from nemo_fp8rl.refit.driver.full_or_delta import Mode
from nemo_fp8rl.refit.interface import Transport
from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.refit.reports import RefitReport
from nemo_fp8rl.refit.transport.nixl import INSTALL
from nemo_fp8rl.workers import WorkerDied, is_single_host

NONE_ON_GPU = "none: align=auto waits until the shared operations have run on a GPU; align=vllm takes them"


@contextmanager
def backends(cfg: Config, load: Callable[[MegatronPolicy], None]) -> Iterator[tuple[MegatronPolicy, EnginePool]]:
    """Yield the policy and the engines, and shut both down at the end of the block.

    Both have already released the memory that they release between phases (offload_between_phases, sleep_level), so
    call `prepare_for_training` or `prepare_for_generation` first.

        load:    brings the policy to its checkpoint, before engines start
        Raises:  UserError where a rank dies; an engine that dies is started again
    """
    with deaths_as_user_errors(), ExitStack() as stack:
        policy = MegatronPolicy(cfg)
        stack.callback(policy.shutdown)
        load(policy)
        if cfg.policy.megatron_cfg.offload_between_phases:
            policy.offload_after_refit()
        generation = EnginePool(cfg, beside=policy.ranks if cfg.policy.generation.colocated.enabled else None)
        stack.callback(generation.shutdown)
        generation.finish_generation()
        yield policy, generation


def build_bridge(cfg: Config, policy: MegatronPolicy, generation: EnginePool, first_version: int = 0) -> RefitBridge:
    """Connect trainer and engines. Raises UserError where the recipe's transport is not available."""
    if choose_alignment(cfg.nemo_fp8rl) == "shared_ops":
        check_fingerprints(policy.describe(), generation.describe())
    choice, transport = cfg.nemo_fp8rl.refit, choose_transport(cfg, policy)
    policy.open_refit(transport, generation.token)
    return RefitBridge(
        policy,
        generation,
        mode=_mode(cfg),
        transport=transport,
        verify=choice.verify or "off",
        bucket_bytes=choice.bucket_bytes,
        first_version=first_version,
    )


def describe_alignments(alignments: frozenset[Alignment], cfg: Config) -> str:
    """Return the ranks' alignments in words, with the reason where auto leaves GPUs without one."""
    return NONE_ON_GPU if alignments == {"none"} and cfg.nemo_fp8rl.align == "auto" else ", ".join(sorted(alignments))


def check_fingerprints(trainer: PolicyDescription, engines: EngineDescription) -> None:
    """Raise UserError, with its name, where an operation that trainer and engines share has other bits on a machine."""
    if found := differing_operations(trainer.fingerprint, engines.fingerprint):
        raise UserError(
            f"nemo_fp8rl.align=vllm: on these machines trainer and engines do not compute the same bits in "
            f"{', '.join(found)}: give both the same GPUs and versions of torch, Triton and Transformer Engine, or set "
            "nemo_fp8rl.align=none"
        )


def refit_or_stop(bridge: RefitBridge, resume_hint: str = "continue with --resume") -> RefitReport:
    """Refit the engines. Raises UserError where that fails; resume_hint: how the user continues after mending it."""
    try:
        return bridge.refit()
    except (RefitError, WorkerDied) as error:  # a rank failed, or an engine failed twice at the commit
        raise UserError(f"{single_line(error)}; mend that, then {resume_hint}") from error


def explained_by(cfg: Config, experts: bool, aligned: bool, asynchronous: bool = False) -> float:
    """Return the mismatch above which a step is alarming, infinite where the recipe wants no alarm.

    It is infinite, too, where the engine alone has a window, because no bound says how much the tokens between matter.

    experts:       the model is a mixture of experts
    aligned:       the trainer rounds as vLLM does
    asynchronous:  engines generate from older weights
    """
    choice = cfg.nemo_fp8rl
    if choice.mismatch_alarm == "none" or cfg.policy.generation.vllm_cfg.kv_window != cfg.trainer_kv_window:
        return math.inf
    return explained_mismatch(
        choice.flow,
        aligned=aligned and not (cfg.fp8_kv_cache and choice.kv == "rollout"),
        fp8_cache=cfg.fp8_kv_cache,
        experts=experts,
        temperature=cfg.policy.generation.temperature,
        # noise in the engine alone is a difference of weights, as their age is
        asynchronous=asynchronous or (choice.noise.enabled and choice.noise.where == "engine"),
    )


def _mode(cfg: Config) -> Mode:
    """Return the refit mode: full versions where engines drop their weights.

    Under auto, versions are also full where the trainer releases memory between phases: the bytes that a delta needs
    would stay beside the generating engines, as large as their weights.
    """
    mode = cfg.nemo_fp8rl.refit.mode
    releases_memory = mode == "auto" and cfg.policy.megatron_cfg.offload_between_phases
    return "full" if releases_memory or cfg.policy.generation.vllm_cfg.sleep_level == 2 else mode


def choose_transport(cfg: Config, policy: MegatronPolicy) -> Transport:
    """Return the recipe's transport, or a suitable one for auto. Raises UserError where it is not available."""
    requested, vllm_cfg = cfg.nemo_fp8rl.refit.transport, cfg.policy.generation.vllm_cfg
    key = "nemo_fp8rl.refit.transport"
    in_one_process = cfg.cluster.backend == "in_process"
    in_one_process = in_one_process and not vllm_cfg.async_engine and vllm_cfg.tensor_parallel_size == 1
    if requested == "auto":
        return "in_process" if in_one_process else "nearest"
    if requested == "nemo_rl":
        raise UserError(f"{key}=nemo_rl: only NeMo RL's own workers have its transport; set it to auto")
    if requested == "in_process" and not in_one_process:
        raise UserError(f"{key}=in_process: trainer and engine run in processes of their own; set it to auto")
    if requested in ("shared_memory", "cuda_ipc") and not is_single_host(cfg):
        raise UserError(
            f"{key}={requested}: the Ray cluster has several hosts for ranks and engines; set it to auto or collective"
        )
    if requested == "cuda_ipc" and not policy.on_gpu():
        raise UserError(f"{key}=cuda_ipc: the trainer's weights are not on GPUs; set it to auto or shared_memory")
    if requested == "cuda_ipc" and in_one_process:
        raise UserError(f"{key}=cuda_ipc: trainer and engine share a process; set it to auto")
    if requested == "nixl" and find_spec("nixl") is None:
        raise UserError(f"{key}=nixl: {INSTALL}, or set it to auto")
    return requested
