"""Checkpoints and refits do not depend on how ranks split the model. bfloat16 and FP8, processes on gloo."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.batch import split_shards
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.region import Region, full_region
from nemo_fp8rl.fp8 import FP8, scale_name
from nemo_fp8rl.fp8.block_scaled import E4M3
from nemo_fp8rl.hf.checkpoint_reader import CheckpointReader
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.hf.model_tensors import expected_tensors
from nemo_fp8rl.hf.storage.part_files import PartReader
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from nemo_fp8rl.policy.weights.checkpoint import load_hf
from nemo_fp8rl.refit.digest import digest_of
from nemo_fp8rl.refit.expert_stacks import expert_name, stack_parts
from nemo_fp8rl.refit.manifest import Sources, TensorPart
from nemo_fp8rl.refit.message import Content
from nemo_fp8rl.refit.receiver.piece_receiver import IncomingLink, ReceivedPiece, receive_pieces
from nemo_fp8rl.refit.route_plan import plan
from nemo_fp8rl.refit.transport.handshake import connect
from nemo_fp8rl.refit.transport.shared_memory import domain
from tests.batches import loss_totals
from tests.conftest import HALF_HEADS
from tests.policy import ranks
from tests.policy.layers.test_routing_replay import random_routes
from tests.policy.ranks import Ranks
from tests.policy.sent import sent_tensors
from tests.policy.test_parallel import name as case_name
from tests.policy.test_worker import random_batch
from tests.run.test_directory import files_end_at

TOKEN = "of these tests"
DENSE = {"vocab_size": 67}  # no multiple of 2
QWEN2 = {"family": "qwen2", "num_key_value_heads": 2}  # biases, of one dimension
HEADS4, DEEP = {"num_key_value_heads": 4}, {"num_hidden_layers": 4}
TIED = {"tie_word_embeddings": True, "family": "llama", **HALF_HEADS}
MOE = {"family": "qwen3_moe"}
WIDE_MOE = {**MOE, "moe_intermediate_size": 256}  # whole blocks on each of two ranks
DP: tuple[str, ...] = ()
TP = ("tensor_model_parallel_size=2",)
SP = (*TP, "sequence_parallel=true")
PP = ("pipeline_model_parallel_size=2",)
CP = ("context_parallel_size=2",)
EP = ("expert_model_parallel_size=2",)
CP_EP = (*CP, *EP)
TP_EP = (*SP, *EP, "expert_tensor_parallel_size=1")
TP4, PP4, EP4 = (tuple(f"{key[:-1]}4" for key in layout) for layout in (TP, PP, EP))
SP4 = (*TP4, "sequence_parallel=true")
ETP1, ETP2 = (*SP, "expert_tensor_parallel_size=1"), ("expert_tensor_parallel_size=2",)


class Model:
    """A checkpoint and the recipes that split it."""

    def __init__(self, recipe, folder, sizes) -> None:
        self.recipe, self.folder = recipe, folder
        write_model(folder, **sizes)
        self.hf = read_hf_config(folder)
        self.shapes = expected_tensors(self.hf)

    def cfg(self, layout, ranks=2):
        return self.recipe(
            f"policy.model_name={self.folder}",
            "cluster.backend=ray",
            f"cluster.train_ranks={ranks}",
            "policy.train_micro_batch_size=2",
            "policy.megatron_cfg.optimizer.lr=0.002",
            "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
            *(f"policy.megatron_cfg.{key}" for key in layout),
        )


@pytest.fixture
def model(recipe, tmp_path):
    return lambda sizes: Model(recipe, tmp_path / "model", sizes)


def single_rank(cfg) -> MegatronWorker:
    worker = MegatronWorker()
    worker.setup(cfg, 0, 1, None)
    return worker


def train(pool: Ranks, infos, steps: range) -> list[dict[str, float]]:
    """Return the metrics of the first reporter, one row per step."""
    rows = []
    for step in steps:
        batch = random_batch(step)
        tokens = float(batch.token_mask[:, 1:].sum())
        parts = split_shards(batch, 1 + max(info.shard for info in infos))
        results = pool.run(_step, [(parts[info.shard], tokens) for info in infos])
        rows.append(next(r for r, info in zip(results, infos, strict=True) if info.is_reporter))
    return rows


def _step(part, tokens: float) -> dict[str, float]:
    return ranks.worker.train_step(part, NllLoss(), loss_totals(8.0, tokens))


def state(folder, shapes) -> dict[str, torch.Tensor]:
    """Read the whole optimizer state, whichever ranks wrote it."""
    with PartReader(folder / "optimizer") as reader:
        kinds = ("master", "exp_avg", "exp_avg_sq")
        return {f"{n}.{kind}": reader.get(f"{n}.{kind}", full_region(s)) for n, s in shapes.items() for kind in kinds}


def weights(folder, shapes) -> dict[str, torch.Tensor]:
    """Read the whole HF checkpoint."""
    with PartReader(folder / "weights") as reader:
        return {n: reader.get(n, full_region(s)) for n, s in shapes.items()}


def are_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)


@pytest.mark.parametrize(
    ("sizes", "layouts"),
    [
        (DENSE, (SP, PP, CP, DP, TP)),
        (QWEN2, (TP, DP, SP)),
        (TIED, (PP, DP, TP)),
        (MOE, (EP, PP, TP_EP, ETP1, CP_EP, ETP2, DP)),
    ],
    ids=["dense", "qwen2", "tied", "moe"],
)
def test_a_checkpoint_moves_between_layouts_to_the_bit(two, model, tmp_path, sizes, layouts):
    """One rank trains and saves; each layout loads the previous checkpoint and saves the same bits."""
    model = model(sizes)
    first = single_rank(model.cfg((), ranks=1))
    for step in range(2):
        batch = random_batch(step)
        first.train_step(batch, NllLoss(), loss_totals(8.0, batch.token_mask[:, 1:].sum()))
    folder = tmp_path / "saved"
    first.save(str(folder))
    expected = state(folder, model.shapes), weights(folder, model.shapes)
    assert any(t.count_nonzero() for n, t in expected[0].items() if n.endswith("exp_avg_sq"))
    for i, layout in enumerate(layouts):
        infos = two.setup(model.cfg(layout))
        two.call("load", str(folder))
        folder = tmp_path / f"saved_{i}"
        two.call("save", str(folder))
        assert are_equal(state(folder, model.shapes), expected[0]), layout
        assert are_equal(weights(folder, model.shapes), expected[1]), layout
        several = layout in (PP, EP, TP_EP, CP_EP)
        assert (folder / "weights/model.safetensors.index.json").exists() == several
        assert (folder / "weights/model.safetensors").exists() != several
        hf = AutoModelForCausalLM.from_pretrained(folder / "weights", dtype=torch.bfloat16).state_dict()
        dense = {n: t for n, t in expected[1].items() if ".experts." not in n}  # transformers stacks those
        assert all(torch.equal(hf[n], t) for n, t in dense.items())
        metrics = train(two, infos, range(2, 3))
        assert metrics[0]["grad_norm"] > 0
    last = single_rank(model.cfg((), ranks=1))
    last.load(str(folder))
    batch = random_batch(7)
    assert torch.equal(last.logprobs(batch), first.logprobs(batch))


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [(DENSE, SP), (QWEN2, TP), (TIED, PP), (MOE, EP)],
    ids=["dense-tp", "qwen2-tp", "tied-pp", "moe-ep"],
)
def test_resume_on_the_same_layout_is_bitwise(two, model, tmp_path, sizes, layout):
    cfg = (model := model(sizes)).cfg(layout)
    infos = two.setup(cfg)
    train(two, infos, range(3))
    two.call("save", str(tmp_path / "middle"))
    expected = train(two, infos, range(3, 6))
    two.call("save", str(tmp_path / "end"))
    infos = two.setup(cfg)
    two.call("load", str(tmp_path / "middle"))
    assert train(two, infos, range(3, 6)) == expected
    two.call("save", str(tmp_path / "resumed"))
    assert are_equal(state(tmp_path / "resumed", model.shapes), state(tmp_path / "end", model.shapes))


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        *((DENSE, TP), (DENSE, SP), (QWEN2, TP), (TIED, PP), (DENSE, DP), (DENSE, CP)),
        *((MOE, EP), (MOE, PP), (MOE, TP_EP), (MOE, CP_EP), (MOE, ETP1), (WIDE_MOE, ETP2)),
    ],
    ids=[
        *("tp", "sp", "qwen2-tp", "tied-pp", "dp", "cp"),
        *("moe-ep", "moe-pp", "moe-tp-ep", "moe-cp-ep", "moe-tp-etp1", "moe-dp-etp2"),
    ],
)
def test_the_parts_of_a_refit_are_the_bytes_of_one_rank(two, model, sizes, layout):
    """The parts that ranks quantize, assembled, have every byte and scale that one rank computes from all weights."""
    model = model(sizes)
    expected = sent_tensors(single_rank(model.cfg((), ranks=1)))
    two.setup(model.cfg(layout))
    holdings, domains = zip(*two.call("open_refit", "nearest", TOKEN), strict=True)
    sources = Sources(holdings, domains)
    everything = {
        name: TensorPart.of(name, FP8 if expected[name].dtype is E4M3 else expected[name].dtype, shape)
        for name, shape in model.shapes.items()
    }
    stored = stack_parts(everything.values(), model.hf.num_experts)
    planned, capacities = plan(sources, [stored], 1 << 16, domains=[[domain()]])
    offers = [(0, [to_sink], sizes) for (to_sink,), sizes in zip(planned, capacities, strict=True)]
    addresses = two.on((0, 1), "offer", offers)
    links = [
        IncomingLink(connect((host, port), TOKEN, name, 60.0), to_sink)
        for ((host, port, name),), (to_sink,) in zip(addresses, planned, strict=True)
    ]
    two.call("start_push", 5, (0,), frozenset(), {})
    got = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    for item in receive_pieces(links, 5):
        for part, content in matrices(item):
            names = (part.name, scale_name(part.name))[: 1 + bool(part.format)]
            place = Content(*(got[name] for name in names)).cut(everything[part.name], part.region)
            for tensor, values in zip(place.tensors, content.tensors, strict=True):
                tensor.copy_(values)
    reports = two.call("finish_push")
    assert are_equal(got, expected)
    nbytes = sum(tensor.nbytes for tensor in expected.values())
    assert sum(report.nbytes for report in reports) == nbytes
    assert max(report.nbytes for report in reports) < 0.9 * nbytes  # no rank sends all; small pieces count as well


def matrices(piece: ReceivedPiece) -> Iterator[tuple[TensorPart, Content]]:
    """Yield each matrix of a piece of a stack of experts by its HF name; any other piece as it is."""
    part, content = piece.part, piece.content
    if not part.is_stack:
        yield part, content
        return
    for i, expert in enumerate(range(*part.region[0])):
        name = expert_name(part.name, expert)
        scales = None if content.scale_inv is None else content.scale_inv[i]
        yield replace(part.matrix, name=name), Content(content.data[i], scales)


def digests() -> dict[tuple[str, Region], str]:
    """Return the digest of each part that the rank of this process may send."""
    layout, shapes = ranks.worker.layout, expected_tensors(ranks.worker.hf)
    parts = ranks.worker.weights().for_refit()
    return {(name, layout.region(name, shapes[name])): digest_of(part) for name, part in parts}


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [(DENSE, DP), (MOE, DP), (MOE, EP), (MOE, ETP1), (MOE, ETP2)],
    ids=["dp", "moe-dp", "moe-ep", "moe-tp-etp1", "moe-dp-etp2"],
)
def test_copies_of_a_part_stay_the_same_to_the_bit(two, model, sizes, layout):
    """So an engine may get the part from any of its ranks."""
    infos = two.setup(model(sizes).cfg(layout))
    before = digests_of(two)
    train(two, infos, range(3))
    after = digests_of(two)
    assert any(after[part] != before[part] for part in after)


def digests_of(two: Ranks) -> dict[tuple[str, Region], str]:
    """Return the digests of the parts that both ranks have."""
    first, second = two.run(digests, [()] * 2)
    both = first.keys() & second.keys()
    assert both
    assert {part: first[part] for part in both} == {part: second[part] for part in both}
    return {part: first[part] for part in both}


FP8_STEPS = [
    *((DENSE, 2, layout, "") for layout in (TP, SP, PP, DP)),
    (QWEN2, 2, SP, ""),
    (MOE, 2, TP_EP, ""),
    (QWEN2, 2, TP, "long"),
    (DENSE, 4, (*SP, *PP), "long"),
    (DEEP, 4, PP4, "long"),
    (MOE, 4, TP_EP, "long"),  # and data-parallel
    *((MOE, 2, layout, "long") for layout in (EP, PP, CP_EP, ETP1)),
    (WIDE_MOE, 2, ETP2, "long"),
    *((DENSE, 4, layout, "long") for layout in (TP, (*TP, *CP), (*PP, *CP))),
    *((HEADS4, 4, layout, "long") for layout in (TP4, SP4)),
    *((MOE, 4, layout, "long") for layout in ((*PP, *EP), (*CP_EP, *PP), (*ETP1, *PP), EP4)),
    (WIDE_MOE, 4, (*SP, *EP), "long"),
    ({**MOE, **HEADS4}, 4, (*SP4, *EP4, "expert_tensor_parallel_size=1"), "long"),
]


@pytest.mark.parametrize(
    ("sizes", "count", "layout"),
    [pytest.param(*case, marks=[pytest.mark.long] if length else []) for *case, length in FP8_STEPS],
    ids=case_name,
)
def test_an_fp8_step_of_ranks_is_that_of_one_within_rounding(request, model, tmp_path, sizes, count, layout):
    """The loss, and Adam's first moment of every gradient after one step, relative to the gradient and to its norm.

    Measured: 1e-6 where no sum is split but the norm's, 0.0024 where tokens are (sums of bfloat16 parts), 0.072 where
    features are (FP8 quantizes other sums). Only experts that are split themselves move the loss, by 8e-4, as they are
    rounded once less (docs/training.md). The batch has the experts of its tokens, as one that goes elsewhere for its
    last bit is a larger difference.
    """
    pool, model, batch = request.getfixturevalue({2: "two", 4: "four"}[count]), model(sizes), random_batch(0)
    if model.hf.num_experts:
        batch = replace(batch, routed_experts=random_routes(0))
    tokens = float(batch.token_mask[:, 1:].sum())
    reference = single_rank(model.cfg((), ranks=1))
    expected = reference.train_step(batch, NllLoss(), loss_totals(8.0, tokens))
    reference.save(str(tmp_path / "one"))
    infos = pool.setup(model.cfg(layout, count))
    parts = split_shards(batch, 1 + max(info.shard for info in infos))
    steps = pool.run(_step, [(parts[info.shard], tokens) for info in infos])
    pool.call("save", str(tmp_path / "several"))
    loss = sum(step["loss"] for step, info in zip(steps, infos, strict=True) if info.is_reporter)
    assert loss == pytest.approx(expected["loss"], abs=2e-3 if sizes == WIDE_MOE else 1e-4)
    tensors = any("tensor" in key for key in layout)
    tokens_split = layout == DP or any(key.startswith(("context", "expert_model")) for key in layout)
    rounding = 0.15 if tensors else 0.01 if tokens_split else 1e-6
    first, second = (state(tmp_path / name, model.shapes) for name in ("one", "several"))
    for n in (n for n in first if n.endswith("exp_avg")):
        assert (second[n] - first[n]).norm() < rounding * first[n].norm(), n
    for step in steps:
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=rounding / 10)


@pytest.mark.parametrize("layout", [DP, TP_EP, CP_EP], ids=["dp", "tp-ep", "cp-ep"])
def test_routers_that_are_frozen_are_saved_once(two, model, tmp_path, layout):
    model = model(MOE)
    infos = two.setup(model.cfg((*layout, "freeze_moe_router=true")))
    train(two, infos, range(1))
    two.call("save", str(tmp_path / "saved"))
    masters, saved = state(tmp_path / "saved", model.shapes), weights(tmp_path / "saved", model.shapes)
    for name in (name for name in model.shapes if name.endswith("mlp.gate.weight")):
        assert torch.equal(masters[f"{name}.master"], saved[name].float())
        assert not masters[f"{name}.exp_avg"].any()


def test_a_save_leaves_nothing_of_one_before_it_in_its_folder(two, model, tmp_path):
    """A killed save may have had more ranks, whose files no rank would overwrite."""
    model = model(DENSE)
    two.setup(model.cfg(TP))
    two.call("save", str(tmp_path / "saved"))
    worker = single_rank(model.cfg((), ranks=1))
    worker.save(str(tmp_path / "saved"))
    assert {path.name for path in (tmp_path / "saved/optimizer").iterdir()} == {"rank_0.safetensors", "steps.json"}
    worker.load(str(tmp_path / "saved"))


def _bytes_read() -> int:
    """Return the bytes that the rank of this process reads from the checkpoint when it loads its weights."""
    sizes, get = [], CheckpointReader.get
    worker = ranks.worker

    def count_bytes(reader, name, region=None):
        tensor = get(reader, name, region)
        sizes.append(tensor.nbytes)
        return tensor

    CheckpointReader.get = count_bytes
    try:
        load_hf(worker.checkpoint.model, worker.model, worker.layout)
    finally:
        CheckpointReader.get = get
    return sum(sizes)


@pytest.mark.parametrize(("sizes", "layout"), [(DENSE, TP), (MOE, EP), (DENSE, PP)], ids=["tp", "ep", "pp"])
def test_a_rank_asks_a_checkpoint_for_its_own_part_only(two, model, sizes, layout):
    model = model(sizes)
    two.setup(model.cfg(layout))
    total = sum(2 * torch.Size(shape).numel() for shape in model.shapes.values())
    for nbytes in two.run(_bytes_read, [()] * 2):
        assert 0 < nbytes < 0.8 * total


def _save(folder: str, room: int | None) -> str:
    """Return the error of `save` on the rank of this process if no file may grow beyond `room` bytes."""
    try:
        with files_end_at(room) if room else nullcontext():
            ranks.worker.save(folder)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("full", [0, 1])
def test_a_disk_that_is_full_for_one_rank_keeps_no_other_waiting(two, model, tmp_path, full):
    model = model(DENSE)
    two.setup(model.cfg(TP))
    room = [None, None]
    room[full] = 1 << 16
    messages = two.run(_save, [(str(tmp_path / "saved"), r) for r in room])
    assert str(tmp_path / "saved") in messages[full] and "\n" not in messages[full]
    assert messages[1 - full] == ""
    two.call("save", str(tmp_path / "saved"))
    assert weights(tmp_path / "saved", model.shapes)


def test_a_folder_that_is_another_on_some_ranks_node_is_refused(two, model, tmp_path):
    """Half of a checkpoint would look complete until it is read."""
    model = model(DENSE)
    two.setup(model.cfg(TP))
    (tmp_path / "a").mkdir()
    messages = two.run(_save, [(str(tmp_path / "a/saved"), None), (str(tmp_path / "b/saved"), None)])
    assert messages[1].startswith(
        f"{tmp_path}/b/saved: rank 1 does not see it: checkpoints need a folder that all nodes"
    )
    assert not (tmp_path / "b").exists()


def test_a_checkpoint_without_the_part_of_one_rank_is_refused(two, model, tmp_path):
    model = model(DENSE)
    two.setup(model.cfg(TP))
    two.call("save", str(tmp_path / "saved"))
    (tmp_path / "saved/optimizer/rank_1.safetensors").unlink()
    with pytest.raises(UserError, match=r"does not hold all of model\.embed_tokens\.weight\.master"):
        single_rank(model.cfg((), ranks=1)).load(str(tmp_path / "saved"))
