"""Both sides of the checkpoint engine in one process, linked by real links, and the weights that they exchange."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.fp8 import Fp8Layers, quantize_blockwise, scale_name
from nemo_fp8rl.nemo_rl.refit_transport.policy_side import PolicySide
from nemo_fp8rl.nemo_rl.refit_transport.rollout_side import RolloutSide
from nemo_fp8rl.nemo_rl.refit_transport.settings import read_settings
from nemo_fp8rl.nemo_rl.refit_transport.topology import Peer
from nemo_fp8rl.refit.digest import bytes_of
from nemo_fp8rl.refit.transport.handshake import Listener

TOKEN = "a token"
LAYERS = Fp8Layers(0, 2)
SETTINGS: dict[str, Any] = {"fp8_layers": {"end": 2}, "timeout_seconds": 20.0, "bucket_bytes": 1 << 19}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
K_SCALE = "model.layers.0.self_attn.attn.k_scale"


def make_weights(seed: int = 0) -> dict[str, Tensor]:
    """Return a model's tensors by HF name: bfloat16, and the scale of a KV cache."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (700, 128), "model.norm.weight": (128,)}
    for i in range(2):
        for name, shape in (("self_attn.q_proj", (1024, 512)), ("mlp.down_proj", (512, 1100))):
            shapes[f"model.layers.{i}.{name}.weight"] = shape
        shapes[f"model.layers.{i}.input_layernorm.weight"] = (128,)
    weights = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    return weights | {K_SCALE: torch.tensor([0.5 + seed])}


def step(weights: Mapping[str, Tensor], share: float = 0.002) -> dict[str, Tensor]:
    """Return the weights after a small step: of each tensor this share of the values differs, and no block's scale."""
    stepped = {}
    for i, (name, weight) in enumerate(weights.items()):
        chosen = torch.rand(weight.shape, generator=torch.Generator().manual_seed(i)) < share
        chosen &= weight.abs() < 1
        stepped[name] = torch.where(chosen, weight * 1.25, weight)
    return stepped | {K_SCALE: weights[K_SCALE] * 2}


def by_contract(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that an engine must load."""
    expected = {}
    for name, weight in weights.items():
        if LAYERS.quantizes(name):
            quantized = quantize_blockwise(weight)
            expected |= {name: quantized.data, scale_name(name): quantized.scale_inv}
        else:
            expected[name] = weight
    return expected


def check_equal(received: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert received.keys() == expected.keys()
    for name, tensor in expected.items():
        assert received[name].dtype is tensor.dtype, name
        assert received[name].shape == tensor.shape, name
        assert torch.equal(bytes_of(received[name]), bytes_of(tensor)), name


@dataclass
class Outcome:
    """A refit's outcome: what each rollout rank was given, and the error of each side."""

    loaded: list[dict[str, Tensor]]
    policy_error: Exception | None
    rollout_errors: list[Exception | None]

    def check(self, weights: Mapping[str, Tensor]) -> None:
        assert (self.policy_error, self.rollout_errors) == (None, [None] * len(self.loaded))
        for loaded in self.loaded:
            check_equal(loaded, by_contract(weights))


class Sides:
    """One policy rank and some rollout ranks. `refit` runs all sides at once, as NeMo RL's driver does."""

    def __init__(self, rollout_ranks: int = 1, **changes: Any) -> None:
        self.settings = read_settings(SETTINGS | changes)
        self.listener = self.listen()
        self.policy = PolicySide(self.settings, self.settings.bucket_bytes)
        self.rollout = [RolloutSide(self.settings) for _ in range(rollout_ranks)]
        self.connect()

    def listen(self) -> Listener:
        return Listener(self.settings.transport, "127.0.0.1", TOKEN, self.settings.timeout_seconds)

    def connect(self) -> None:
        """Connect all ranks, as after NeMo RL's `init_communicator`."""
        self.policy.connect(self.listener, [(i, side.store.version) for i, side in enumerate(self.rollout)])
        for i, side in enumerate(self.rollout):
            side.connect(i, Peer(*self.listener.address, TOKEN, "", ""))

    def close(self) -> None:
        self.policy.disconnect()
        for side in self.rollout:
            side.disconnect()
        self.listener.close()

    def refit(self, weights: Mapping[str, Tensor] | Iterator[tuple[str, Tensor]]) -> Outcome:
        stream = iter(weights.items()) if isinstance(weights, Mapping) else weights
        with ThreadPoolExecutor() as threads:
            sent = threads.submit(self.policy.send, stream)
            received = [threads.submit(_load, side) for side in self.rollout]
        results = [future.result() for future in received]
        error = sent.exception()
        assert error is None or isinstance(error, Exception)
        return Outcome([loaded for loaded, _ in results], error, [failure for _, failure in results])


def _load(side: RolloutSide) -> tuple[dict[str, Tensor], Exception | None]:
    loaded: dict[str, Tensor] = {}
    try:
        for batch in side.receive():
            loaded |= {name: tensor.clone() for name, tensor in batch}
    except Exception as error:
        return loaded, error
    return loaded, None


def wire_over_bf16(sides: Sides) -> float:
    """Return the bytes of the last refit's FP8 tensors on the wire over their bytes in bfloat16."""
    report = sides.policy.metrics.report
    return report.quantized_nbytes / report.quantized_bf16_nbytes


def names_of(batches: Sequence[tuple[str, Tensor]]) -> list[str]:
    return [name for name, _ in batches]
