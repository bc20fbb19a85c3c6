"""A policy, its generation backend, and the bridge between them: who they are decides how the bytes travel."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec

from nemo_fp8rl.common.errors import UserError, one_line
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.generation.engine_pool import EnginePool
from nemo_fp8rl.policy.rank_group import MegatronPolicy, deaths_as_user_errors
from nemo_fp8rl.refit.bridge import RefitBridge, Transport
from nemo_fp8rl.refit.full_or_delta import Mode
from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.refit.reports import RefitReport
from nemo_fp8rl.refit.transport.nixl import INSTALL
from nemo_fp8rl.workers import WorkerDied, is_single_host


@contextmanager
def backends(cfg: Config, load: Callable[[MegatronPolicy], None]) -> Iterator[tuple[MegatronPolicy, EnginePool]]:
    """The policy, at the checkpoint that `load` gives it, and the engines; both end with the block.

    What gives memory back between phases (offload_between_phases, sleep_level) has done so: a policy needs
    `prepare_for_training` first, engines `prepare_for_generation`.

    Raises UserError where a rank dies; an engine that does is started again.
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
    """Raises UserError where the transport that the recipe names cannot be had."""
    choice, transport = cfg.nemo_fp8rl.refit, checked_transport(cfg, policy)
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


def refitted(bridge: RefitBridge, then: str = "continue with --resume") -> RefitReport:
    """`bridge.refit()`. Raises UserError where it fails; then: how the run goes on once that is mended."""
    try:
        return bridge.refit()
    except (RefitError, WorkerDied) as error:  # of a rank, or of an engine a second time as it commits
        raise UserError(f"{one_line(error)}; mend that, then {then}") from error


def _mode(cfg: Config) -> Mode:
    """Whole versions where engines drop their weights. Under auto also where the trainer's memory is given back between
    phases: the bytes kept for a delta would stay beside engines that generate, as large as their weights.
    """
    mode = cfg.nemo_fp8rl.refit.mode
    gives_back = mode == "auto" and cfg.policy.megatron_cfg.offload_between_phases
    return "full" if gives_back or cfg.policy.generation.vllm_cfg.sleep_level == 2 else mode


def checked_transport(cfg: Config, policy: MegatronPolicy) -> Transport:
    """What the recipe asks for, where that can be had; for auto what suits it."""
    asked, vllm_cfg = cfg.nemo_fp8rl.refit.transport, cfg.policy.generation.vllm_cfg
    here = "nemo_fp8rl.refit.transport"
    together = cfg.cluster.backend == "in_process"
    together = together and not vllm_cfg.async_engine and vllm_cfg.tensor_parallel_size == 1
    if asked == "auto":
        return "in_process" if together else "nearest"
    if asked == "in_process" and not together:
        raise UserError(f"{here}=in_process: trainer and engine run in processes of their own; set it to auto")
    if asked in ("shared_memory", "cuda_ipc") and not is_single_host(cfg):
        raise UserError(
            f"{here}={asked}: the Ray cluster has several hosts for ranks and engines; set it to auto or collective"
        )
    if asked == "cuda_ipc" and not policy.on_gpu():
        raise UserError(f"{here}=cuda_ipc: the trainer's weights are not on GPUs; set it to auto or shared_memory")
    if asked == "cuda_ipc" and together:
        raise UserError(f"{here}=cuda_ipc: trainer and engine share a process; set it to auto")
    if asked == "nixl" and find_spec("nixl") is None:
        raise UserError(f"{here}=nixl: {INSTALL}, or set it to auto")
    return asked
