"""The settings of the checkpoint engine: the block `policy.generation.refit_cfg["module:Class"]` of a recipe."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.field_rules import ABOVE_0, AT_LEAST_0, Block, Range
from nemo_fp8rl.config.typed_tree import read_block
from nemo_fp8rl.fp8.layers import Fp8Layers
from nemo_fp8rl.fp8.names import ScaleFormat

ENGINE = "nemo_fp8rl.nemo_rl.refit_transport.checkpoint_engine:Fp8CheckpointEngine"
"""The value of policy.generation.refit_transport, and the key of the settings in refit_cfg."""
KEY = f'policy.generation.refit_cfg["{ENGINE}"]'
OF_NEMO_RL = ("release_after_refit", "update_weights_bucket_memory_ratio")
"""Keys of the block that NeMo RL reads itself; it passes the first one on to the class."""
TIMEOUT = f"{KEY}.timeout_seconds"
LARGEST_BUCKET = 256 << 20
"""Bytes. NeMo RL's buckets are a share of a GPU's memory, which is more than a link needs to be busy."""


@dataclass(frozen=True)
class Fp8LayersBlock(Block):
    first: Annotated[int, AT_LEAST_0] = 0
    """The first decoder layer whose projections are FP8."""
    end: Annotated[int, AT_LEAST_0] = 0
    """The layer after the last one; 0: nothing is quantized here, and FP8 that the worker streams is sent as it is."""
    ignored: tuple[str, ...] = ()
    """Words; a projection with one of them in its name stays in high precision."""


@dataclass(frozen=True)
class Settings(Block):
    mode: Literal["full", "delta"] = "delta"
    """delta sends changes to a receiver that stores the version before."""
    scale_format: ScaleFormat = "pow2"
    """Format of the scales of the weights."""
    fp8_layers: Fp8LayersBlock = field(default_factory=Fp8LayersBlock)
    transport: Literal["nearest", "shared_memory", "cuda_ipc", "nixl", "collective"] = "nearest"
    """How bytes travel, as nemo_fp8rl.refit.transport."""
    host: str = ""
    """Address of this machine for the other side; empty: the address of the Ray node, without Ray the loopback."""
    timeout_seconds: Annotated[float, ABOVE_0] = 300.0
    """Seconds that one wait for the other side may last."""
    retries: Annotated[int, Range(at_least=0, at_most=10)] = 1
    """How often a refit sends a receiver the whole version again after a failure."""
    bucket_bytes: Annotated[int, Range(at_least=1 << 16)] = LARGEST_BUCKET
    """Upper bound of a bucket; a link has two."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where both sides store the bytes of a version: one byte per FP8 value."""

    @property
    def layers(self) -> Fp8Layers:
        return Fp8Layers(self.fp8_layers.first, self.fp8_layers.end, tuple(self.fp8_layers.ignored))


def settings_of_recipe(generation: Mapping[str, Any]) -> Settings:
    """Return the settings in a recipe's block policy.generation, whose refit_transport is ENGINE.

    Raises: UserError as `read_settings`, and without a block for ENGINE, which NeMo RL demands even if it is empty
    """
    block = (generation.get("refit_cfg") or {}).get(ENGINE)
    if not isinstance(block, Mapping):
        raise UserError(f"policy.generation.refit_transport={ENGINE} needs the block {KEY}, which may be empty: {{}}")
    return read_settings(block)


def read_settings(values: Mapping[str, Any]) -> Settings:
    """Return the settings of a block.

    values:  the block, or what NeMo RL passes of it to the class
    Raises:  UserError, naming the key, for an unknown key, a wrong type or a value out of range
    """
    return read_block({k: v for k, v in values.items() if k not in OF_NEMO_RL}, Settings, f"{KEY}.")
