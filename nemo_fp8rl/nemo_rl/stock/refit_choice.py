"""Choose who carries a refit between NeMo RL's own workers: our checkpoint engine or a transport of NeMo RL's."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from nemo_fp8rl.config.fp8rl_schema import RefitConfig
from nemo_fp8rl.nemo_rl.recipe.gpu_division import is_colocated
from nemo_fp8rl.nemo_rl.refit_transport.settings import ENGINE

NEMO_RL = "nemo_rl"
"""The value of nemo_fp8rl.refit.transport that leaves a refit to NeMo RL's own transport."""


def choose_refit(policy: dict[str, Any], refit: RefitConfig, nodes: int, has_checkpoint_engines: bool) -> str:
    """Set refit_transport in an FP8 `policy` block of NeMo RL where our checkpoint engine fits, and return who carries.

    A recipe that names a transport keeps it.

    refit:                   the block nemo_fp8rl.refit
    nodes:                   cluster.num_nodes
    has_checkpoint_engines:  as `Checkout.has_checkpoint_engines`
    """
    generation = policy["generation"]
    if named := generation.get("refit_transport"):
        return f"refits go by policy.generation.refit_transport={named}"
    if reason := _why_not(generation, refit, nodes, has_checkpoint_engines):
        return f"refits go by NeMo RL's own transport: {reason}"
    settings: dict[str, Any] = {"bucket_bytes": refit.bucket_bytes}
    if refit.mode == "full":
        settings["mode"] = "full"
    if refit.transport != "auto":
        settings["transport"] = refit.transport
    generation["refit_transport"] = ENGINE
    generation["refit_cfg"] = {**_block(generation.get("refit_cfg")), ENGINE: settings}
    return (
        "refits go by our checkpoint engine (FP8 bytes, deltas, digests, versions); "
        f"nemo_fp8rl.refit.transport={NEMO_RL} leaves them to NeMo RL's own transport"
    )


def _why_not(generation: Mapping[str, Any], refit: RefitConfig, nodes: int, has_checkpoint_engines: bool) -> str:
    if refit.transport == NEMO_RL:
        return f"nemo_fp8rl.refit.transport={NEMO_RL}"
    if not has_checkpoint_engines:
        return "this version has no checkpoint engines"
    if is_colocated(generation):
        return "checkpoint engines need policy.generation.colocated.enabled=false"
    if nodes > 1 and refit.transport != "nixl":
        return "between nodes our checkpoint engine is chosen with nemo_fp8rl.refit.transport=nixl alone"
    if refit.transport == "in_process":
        return "nemo_fp8rl.refit.transport=in_process is for our own loop"
    return "" if refit.transport != "nixl" or find_spec("nixl") else "nixl is not installed"


def _block(refit_cfg: Any) -> dict[str, Any]:
    """Return the block refit_cfg, which is a mapping or one of NeMo RL's objects, as a mapping."""
    return refit_cfg.model_dump() if hasattr(refit_cfg, "model_dump") else dict(refit_cfg or {})
