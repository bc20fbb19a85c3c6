"""A refit is committed by every engine or not at all, and whatever is wrong with it is named before it is applied."""

import math
from collections.abc import Callable

import pytest
import torch

from nemo_fp8rl.fp8 import Fp8Layers
from nemo_fp8rl.refit.bridge import Acknowledgement, RefitBridge
from nemo_fp8rl.refit.manifest import Manifest, RefitError, Update
from nemo_fp8rl.refit.quantize import build_update

LAYERS = {True: Fp8Layers(0, 36), False: Fp8Layers.none()}

PROJECTION, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
SCALE = PROJECTION + "_scale_inv"
Damage = Callable[[dict[str, torch.Tensor]], None]


class FakeSource:
    """A trainer of two weights; `damage` changes the tensors of the next update, its manifest follows."""

    def __init__(self, fp8: bool = True) -> None:
        self.fp8, self.damage = fp8, None
        self.weights = {PROJECTION: torch.ones(256, 128).bfloat16(), NORM: torch.ones(128).bfloat16()}

    def export_update(self, version: int) -> Update:
        update = build_update(self.weights.items(), version, LAYERS[self.fp8], "pow2")
        if self.damage:
            self.damage(update.tensors)
        return Update(Manifest.of(version, update.tensors), update.tensors)


class FakeSink:
    """Engines that verify and keep what they are sent; those in `stuck` answer with the version they had."""

    def __init__(self, fp8: bool = True, engines: int = 2) -> None:
        self.fp8, self.engines, self.stuck = fp8, engines, set()
        self.applied: list[Update] = []

    def load_update(self, handle: Update) -> list[Acknowledgement]:
        handle.verify({PROJECTION: (256, 128), NORM: (128,)}, LAYERS[self.fp8])
        self.applied.append(handle)
        version = handle.manifest.version
        return [Acknowledgement(version - (i in self.stuck), handle.nbytes) for i in range(self.engines)]


def put(name: str, tensor: torch.Tensor | None) -> Damage:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor

    return damage


def test_versions_grow_by_one_a_refit():
    source, sink = FakeSource(), FakeSink()
    bridge = RefitBridge(source, sink)
    assert bridge.version == -1
    reports = [bridge.refit() for _ in range(3)]
    assert [report.version for report in reports] == [0, 1, 2]
    assert [update.manifest.version for update in sink.applied] == [0, 1, 2]
    assert bridge.version == 2


def test_a_resumed_run_goes_on_with_its_first_version():
    bridge = RefitBridge(FakeSource(), FakeSink(), first_version=40)
    assert bridge.version == 39
    assert bridge.refit().version == bridge.version == 40


@pytest.mark.parametrize("fp8", [True, False])
def test_a_refit_brings_the_present_weights_and_reports_their_bytes(fp8):
    source, sink = FakeSource(fp8), FakeSink(fp8)
    bridge = RefitBridge(source, sink)
    bridge.refit()
    source.weights[NORM] = torch.full((128,), 3.0).bfloat16()
    report = bridge.refit()
    assert torch.equal(sink.applied[1].tensors[NORM], source.weights[NORM])
    assert report.nbytes == 256 * 128 * (1 if fp8 else 2) + 128 * 2 + (2 * 4 if fp8 else 0)
    metrics = report.metrics()
    assert (metrics["refit/bytes"], metrics["refit/version"]) == (report.nbytes, 1)
    assert metrics["timing/refit"] == metrics["timing/refit_export"] + metrics["timing/refit_load"]
    assert min(metrics.values()) >= 0


DAMAGES = [
    (put(NORM, None), NORM),
    (put(PROJECTION, None), PROJECTION),
    (put("model.extra.weight", torch.zeros(1)), "model.extra.weight"),
    (put(SCALE, None), SCALE),
    (put(SCALE, torch.ones(1, 2)), SCALE),
    (put(SCALE, torch.ones(2, 1, dtype=torch.float64)), SCALE),
    (put(SCALE, torch.tensor([[1.0], [math.nan]])), SCALE),
    (put(PROJECTION, torch.ones(256, 128).bfloat16()), PROJECTION),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGES)
def test_a_damaged_update_is_named_and_not_committed(damage, named):
    source, sink = FakeSource(), FakeSink()
    bridge = RefitBridge(source, sink)
    bridge.refit()
    source.damage = damage
    with pytest.raises(RefitError, match=named.replace(".", r"\.")):
        bridge.refit()
    assert (bridge.version, len(sink.applied)) == (0, 1)
    source.damage = None
    assert bridge.refit().version == 1


def test_an_fp8_update_for_a_bf16_engine_is_refused():
    sink = FakeSink(fp8=False)
    bridge = RefitBridge(FakeSource(fp8=True), sink)
    with pytest.raises(RefitError, match="up_proj"):
        bridge.refit()
    assert (bridge.version, sink.applied) == (-1, [])


@pytest.mark.parametrize("name", [PROJECTION, NORM])
def test_a_weight_that_is_not_finite_is_named_and_not_sent(name):
    source, sink = FakeSource(), FakeSink()
    bridge = RefitBridge(source, sink)
    source.weights[name].view(-1)[5] = math.nan
    with pytest.raises(RefitError, match=name.replace(".", r"\.")):
        bridge.refit()
    assert (bridge.version, sink.applied) == (-1, [])


@pytest.mark.parametrize("stuck", [{0}, {1}, {0, 1}])
def test_an_engine_that_did_not_commit_is_named_and_the_version_stays(stuck):
    sink = FakeSink()
    bridge = RefitBridge(FakeSource(), sink)
    bridge.refit()
    sink.stuck = stuck
    with pytest.raises(RefitError, match=rf"refit 1: engines \[{', '.join(map(str, sorted(stuck)))}\]"):
        bridge.refit()
    assert bridge.version == 0
    sink.stuck = set()
    assert bridge.refit().version == bridge.version == 1


def test_no_acknowledgement_is_no_commit():
    bridge = RefitBridge(FakeSource(), FakeSink(engines=0))
    with pytest.raises(RefitError):
        bridge.refit()
    assert bridge.version == -1
