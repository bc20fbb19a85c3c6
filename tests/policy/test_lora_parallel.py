"""Ranks that share a model train the adapters of one rank. Processes on gloo; float32 unless a test says otherwise."""

import pytest
import torch

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.batch import split_shards
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.hf.adapters import adapter_tensors
from nemo_fp8rl.policy.weights.layout import Layout
from tests.batches import loss_totals
from tests.policy import ranks
from tests.policy.test_parallel import CP, DP, EP, ETP1, MOE, PP, SP, TP, name, random_batch
from tests.policy.test_parallel_state import are_equal, state
from tests.policy.test_worker import new_worker, train

QWEN2 = {"family": "qwen2", "num_key_value_heads": 2}
TIED = {"family": "qwen3", "tie_word_embeddings": True}
AGAIN = "activation_checkpointing=true"
QKV = "peft.target_modules=[linear_qkv]"
RANKS_OF_TWO = ("cluster.backend=ray", "cluster.train_ranks=2")
PACKED = "packed"
CASES = [
    *((QWEN2, layout) for layout in (TP, (*SP, AGAIN), CP)),
    (TIED, (*PP, AGAIN)),
    (QWEN2, (*PP, AGAIN)),
    (TIED, (*DP, PACKED)),
    (MOE, (*SP, *EP, *ETP1)),
    (MOE, (*EP, QKV)),
]
LONG = [
    (TIED, SP),
    (QWEN2, PP),
    (MOE, (*SP, *ETP1)),
    (MOE, PP),
    (MOE, (*PP, QKV)),
]


def case(value: object) -> str:
    if isinstance(value, dict):
        return name(value)
    further = {AGAIN: "again", QKV: "qkv", PACKED: "packed"}
    layout = tuple(key for key in value if key not in further)
    return "-".join([name(layout), *(further[key] for key in value if key in further)])


def keys_of(folder, layout, dtype="float32", flow="bf16") -> tuple[str, ...]:
    packed = ("policy.sequence_packing.enabled=true",) if PACKED in layout else ()
    return (
        f"policy.model_name={folder}",
        f"policy.precision={dtype}",
        f"nemo_fp8rl.flow={flow}",
        "policy.train_micro_batch_size=2",
        "policy.train_global_batch_size=8",
        "policy.megatron_cfg.peft.enabled=true",
        "policy.megatron_cfg.peft.lora_B_init_method=kaiming",
        "policy.megatron_cfg.optimizer.clip_grad=1.0e9",
        "policy.megatron_cfg.optimizer.lr=0.01",
        "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
        *(f"policy.megatron_cfg.{key}" for key in layout if key != PACKED),
        *packed,
    )


def single_rank_keys(layout) -> tuple[str, ...]:
    return tuple(key for key in layout if key in (QKV, PACKED))


def steps_of(pool, cfg, steps: int = 1):
    """Return the log-probs of the whole batch and each step's gradient norm."""
    infos, batch = pool.setup(cfg), random_batch()
    parts = split_shards(batch, cfg.data_parallel_size)
    tokens = float(batch.token_mask[:, 1:].sum())
    results = pool.run(_steps, [(parts[info.shard], float(batch.num_rows), tokens, steps) for info in infos])
    answers = {info.shard: logprobs for info, (logprobs, _) in zip(infos, results, strict=True) if info.is_reporter}
    return torch.cat([answers[shard] for shard in sorted(answers)]), results[0][1]


def _steps(part, sequences: float, tokens: float, steps: int):
    totals = loss_totals(sequences, tokens)
    before = ranks.worker.logprobs(part)
    return before, [ranks.worker.train_step(part, NllLoss(), totals)["grad_norm"] for _ in range(steps)]


@pytest.mark.parametrize(
    ("sizes", "layout"),
    CASES
    + [pytest.param(*c, marks=pytest.mark.long) for c in LONG]
    + [pytest.param(MOE, (*CP, *EP, AGAIN), marks=pytest.mark.long)],
    ids=case,
)
def test_two_ranks_train_the_adapters_of_one(two, recipe, tmp_path, sizes, layout):
    """The first moment is the gradient times a constant; one rank then goes on from what two ranks saved."""
    write_model(tmp_path / "model", seed=3, **sizes)
    batch = random_batch()
    single = new_worker(recipe(*keys_of(tmp_path / "model", single_rank_keys(layout))))
    shapes = adapter_tensors(single.hf, single.layout.adapters)
    expected, norm = single.logprobs(batch), train(single, batch)["grad_norm"]
    single.save(str(tmp_path / "one"))
    actual, (norm_of_two,) = steps_of(two, recipe(*keys_of(tmp_path / "model", layout), *RANKS_OF_TWO))
    two.call("save", str(tmp_path / "two"))
    inside = torch.arange(22) < batch.input_lengths[:, None]
    torch.testing.assert_close(actual[inside], expected[inside], rtol=1e-5, atol=1e-5)
    assert norm_of_two == pytest.approx(norm, rel=1e-4)
    of_one, of_two = state(tmp_path / "one", shapes), state(tmp_path / "two", shapes)
    for tensor, values in of_one.items():
        if tensor.endswith(".exp_avg"):
            assert values.any(), tensor
            torch.testing.assert_close(of_two[tensor], values, rtol=1e-3, atol=1e-5 * float(values.norm()))
    single.load(str(tmp_path / "two"))
    single.save(str(tmp_path / "again"))
    assert are_equal(state(tmp_path / "again", shapes), of_two)
    assert _file(tmp_path / "again") == _file(tmp_path / "two")


def _file(folder) -> bytes:
    return (folder / "adapter/adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize(("sizes", "layout"), [(QWEN2, TP), (MOE, (*SP, *EP, *ETP1)), (TIED, (*PP, AGAIN))], ids=case)
def test_a_resume_with_dropout_is_bitwise(two, recipe, tmp_path, sizes, layout):
    write_model(tmp_path / "model", seed=3, **sizes)
    dropout = ("policy.megatron_cfg.peft.dropout=0.2",)
    cfg = recipe(*keys_of(tmp_path / "model", layout, "bfloat16", "fp8_e2e"), *dropout, *RANKS_OF_TWO)
    _, norms = steps_of(two, cfg, 2)
    two.call("save", str(tmp_path / "middle"))
    expected = _go_on(two, cfg)
    two.call("save", str(tmp_path / "end"))
    two.setup(cfg)
    two.call("load", str(tmp_path / "middle"))
    assert _go_on(two, cfg) == expected
    two.call("save", str(tmp_path / "resumed"))
    assert _file(tmp_path / "resumed") == _file(tmp_path / "end")
    assert len({*norms, *expected}) == 4


def _go_on(two, cfg) -> list[float]:
    batch = random_batch()
    parts, tokens = split_shards(batch, cfg.data_parallel_size), float(batch.token_mask[:, 1:].sum())
    return two.run(_steps, [(parts[0], 8.0, tokens, 2)] * 2)[0][1]


@pytest.mark.parametrize("position", ["pre", "post"])
def test_layers_that_are_computed_again_drop_the_same_values_and_torchs_generator_stays(recipe, tmp_path, position):
    write_model(tmp_path / "model", seed=3, **TIED)
    dropout = ("policy.megatron_cfg.peft.dropout=0.5", f"policy.megatron_cfg.peft.dropout_position={position}")
    norms = []
    for layout, further in (((), dropout), ((AGAIN,), dropout), ((), ())):
        worker = new_worker(recipe(*keys_of(tmp_path / "model", layout), *further))
        start, logprobs = torch.get_rng_state(), worker.logprobs(random_batch())
        norms.append([train(worker, random_batch())["grad_norm"] for _ in range(2)])
        assert torch.equal(torch.get_rng_state(), start)
        assert not torch.equal(worker.logprobs(random_batch()), logprobs)
        after = worker.logprobs(random_batch())
        assert torch.equal(worker.logprobs(random_batch()), after)  # nothing is dropped beside training
    assert norms[0] == norms[1]
    assert norms[0] != norms[2]


def test_ranks_with_other_tokens_or_layers_drop_other_values():
    from nemo_fp8rl.policy.weights.layout import Axis

    axes = ("data", "context", "pipeline")
    second = [Layout(None, **{axis: Axis(1, 2)}).dropout_seed(False) for axis in axes]
    seeds = {*second, Layout(None).dropout_seed(False)}
    assert len(seeds) == 4
    of_tensor = Layout(None, tensor=Axis(1, 2))
    assert of_tensor.dropout_seed(False) == Layout(None).dropout_seed(False)
    assert of_tensor.dropout_seed(True) not in seeds
