"""What a real engine refuses to take for the trainer's version, and finds in its memory that is not."""

import gc
import struct
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.common.region import region_slices
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation import vllm_compat
from nemo_fp8rl.generation.weights.weight_store import WeightStore
from nemo_fp8rl.refit.digest import xxh3_digest
from nemo_fp8rl.refit.manifest import Sources
from nemo_fp8rl.refit.message import Header
from nemo_fp8rl.refit.receiver.piece_receiver import IncomingLink
from nemo_fp8rl.refit.route_plan import align_up
from nemo_fp8rl.refit.sender.push import Link
from nemo_fp8rl.refit.sender.weight_sender import WeightSender
from nemo_fp8rl.refit.transport.in_process import in_process_link
from tests.conftest import RECIPES
from tests.generation.pair import Pair
from tests.refit.memory_engine import Message, Tampered, at_rest, split

K_SCALE, UP_PROJ = "model.layers.1.self_attn.k_scale", "model.layers.1.mlp.up_proj.weight"
CACHE = "policy.generation.vllm_cfg.kv_cache_dtype=fp8"


@pytest.fixture(scope="module")
def pair(tiny_overrides) -> Iterator[Pair]:
    pair = Pair(load(RECIPES / "tiny_cpu.yaml", [*tiny_overrides, "nemo_fp8rl.flow=fp8_e2e", CACHE]))
    yield pair
    pair.close()


@pytest.fixture(autouse=True)
def refitted(pair) -> None:
    """Whatever the test before left in the engine."""
    pair.refit()


NO_DIGEST = "none"


def answer(pair: Pair, change: Callable[[Tensor], str] | None = None, *, later: int = 0, compare: bool = False) -> str:
    """What the engine says to a version, so much later than its own, in "" where it took it. change: of the bytes of
    one layer's k_scale on their way; returns the digest that goes with them, "" for the trainer's.
    """
    worker = worker_of(pair)
    if change is not None:
        worker.refit_links = [
            replace(link, end=Tampered(link.end, at_k_scale(link, change))) for link in worker.refit_links
        ]
    version = pair.bridge.version + later
    pair.worker.start_push(version, [0], frozenset(), {"digests": True})
    *_, refusal = worker.nemo_fp8rl_load(version, True, compare, True)
    pair.worker.finish_push()
    pair.bridge.links.disconnect(0)
    return refusal


def worker_of(pair: Pair) -> Any:
    return pair.engine.core.llm.model_executor.driver_worker.worker


def at_k_scale(link: IncomingLink, change: Callable[[Tensor], str]) -> Callable[[int, Message], list[Message]]:
    def changed(_: int, message: Message) -> list[Message]:
        header, payload = Header.decode(message[0]), message[1]
        entries, at = list(header.entries), 0
        for i, entry in enumerate(entries):
            at = align_up(at)
            if link.route[entry.piece].name == K_SCALE:
                digest = change(payload[at : at + 4]) or entry.digest
                entries[i] = entry._replace(digest=digest.removeprefix(NO_DIGEST))
            at += entry.nbytes
        return [(replace(header, entries=tuple(entries)).encode(), payload)]

    return changed


def attention_of(pair: Pair) -> Any:
    return worker_of(pair).model_runner.get_model().get_submodule(K_SCALE.replace(".k_scale", ".attn"))


def test_a_kv_scale_with_a_flipped_bit_is_refused(pair):
    def flip(scale: Tensor) -> str:
        scale[0] ^= 1
        return ""

    version = pair.bridge.version + 1
    assert answer(pair, flip, later=1) == f"refit {version}: {K_SCALE} was damaged on its way"


def test_a_refused_version_keeps_no_link(pair, monkeypatch):
    """Nor memory of the trainer's that it maps."""
    ends = list[weakref.ref[Tampered]]()

    class Watched(Tampered):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            ends.append(weakref.ref(self))

    monkeypatch.setattr(f"{__name__}.Tampered", Watched)
    gc.disable()  # nothing waits for it
    try:
        assert answer(pair, lambda scale: "0" * 16, later=1).endswith("was damaged on its way")
        assert ends and not any(end() for end in ends)
    finally:
        gc.enable()


def test_without_a_link_there_is_no_version(pair):
    worker = worker_of(pair)
    worker.nemo_fp8rl_disconnect()
    *_, refusal = worker.nemo_fp8rl_load(pair.bridge.version + 1, True, False, True)
    assert refusal == "this engine has no link to a trainer"
    pair.bridge.links.disconnect(0)


def test_a_piece_without_its_digest_is_refused_where_digests_are_verified(pair):
    def flip_without(scale: Tensor) -> str:
        scale[0] ^= 1
        return NO_DIGEST

    assert answer(pair, flip_without, later=1).endswith(f"{K_SCALE} was damaged on its way")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -0.5])
def test_a_kv_scale_that_no_cache_can_have_is_refused(pair, value):
    """Though it is what the trainer sent."""

    def put(scale: Tensor) -> str:
        scale.copy_(torch.frombuffer(bytearray(struct.pack("<f", value)), dtype=torch.uint8))
        return xxh3_digest(scale)

    refusal = answer(pair, put, later=1)
    assert refusal == f"refit {pair.bridge.version + 1}: {K_SCALE} is {value}; a KV scale is finite and above 0"


def test_a_kv_scale_that_arrived_and_is_not_in_the_engine_is_refused(pair, monkeypatch):
    original = vllm_compat.set_kv_scales
    monkeypatch.setattr(vllm_compat, "set_kv_scales", lambda attention, k, v, q: original(attention, k * 2, v, q))
    assert answer(pair, later=1).endswith("k_scale in the engine is not what the trainer sent")


@pytest.mark.parametrize("form", ["the buffer", "the number"])
def test_verify_full_finds_a_kv_scale_that_is_another(pair, form):
    if form == "the buffer":
        attention_of(pair)._k_scale.mul_(2)
    else:
        attention_of(pair)._k_scale_float *= 2
    refusal = answer(pair, compare=True)
    assert refusal == f"refit {pair.bridge.version}: {K_SCALE} in the engine is not what the trainer holds"


def test_verify_full_finds_a_weight_that_is_another(pair):
    slot = worker_of(pair).weight_store.slots[UP_PROJ]
    slot.content().data.view(torch.uint8)[-1, -1] ^= 1
    refusal = answer(pair, compare=True)
    assert refusal == f"refit {pair.bridge.version}: {UP_PROJ} in the engine is not what the trainer holds"


def test_verify_full_finds_nothing_where_all_is_as_sent(pair):
    assert answer(pair, compare=True) == ""


def test_a_version_before_the_engines_own_is_stale(pair):
    version = worker_of(pair).weight_store.version
    refusal = answer(pair, later=-1)
    assert refusal == f"refit {pair.bridge.version - 1} is stale: this engine has had version {version}"
    assert worker_of(pair).weight_store.version == version


def test_a_trainer_rank_that_is_ahead_waits_for_the_others(pair):
    """While vLLM's loaders work, which keep what they have of a module; two ranks hold half of each tensor."""
    store, version = WeightStore(worker_of(pair).model_runner), pair.bridge.version
    sources = split(store.parts, 2, 0, replicate=False)
    weights = dict(pair.worker.weights().for_checkpoint()) | dict(pair.worker.kv_cache.scales.named_tensors())
    early: list[int] = []
    read: list[int] = []

    def counted(_: int, message: Message) -> list[Message]:
        read.append(message[1].nbytes)
        return [message]

    def own(rank: int) -> Iterator[tuple[str, Tensor]]:
        if rank == 1:
            at_rest(lambda: len(read))
            early.append(sum(read))
        for part in sources[rank]:
            yield part.name, weights[part.name][region_slices(part.region)]

    links: list[Link] = []
    incoming = []
    for (route,) in Sources(sources).routes([store.parts], 1 << 20):
        sending, receiving = in_process_link(max(align_up(piece.nbytes) for piece in route), 60.0)
        links.append(Link(sending, route))
        incoming.append(IncomingLink(Tampered(receiving, counted), route))
    with ThreadPoolExecutor() as threads:
        sending = [
            threads.submit(WeightSender(sources[rank], "pow2").send, own(rank), version, {(0, 0): link})
            for rank, link in enumerate(links)
        ]
        store.load(incoming, version, True)
        assert not any(one.result().failed for one in sending)
    assert 0 < early[0] < sum(part.nbytes for part in sources[0]) * 2 / 3  # of two layers; else all of it
