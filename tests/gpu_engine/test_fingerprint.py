"""Fingerprints of the shared operations: equal where the bits are, and an operation with another bit is named."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from nemo_fp8rl.assemble import check_fingerprints
from nemo_fp8rl.commands.doctor import fingerprints as doctor
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation.fp8_method.shared_ops.experts import expert_product
from nemo_fp8rl.generation.interface import EngineDescription
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.hf.shared_operations import Shapes, operation_shapes
from nemo_fp8rl.ops import fingerprint as module
from nemo_fp8rl.policy.interface import PolicyDescription
from tests.conftest import RECIPES

SHAPES = Shapes(
    hidden_size=128,
    intermediate_size=128,
    heads=4,
    groups=2,
    head_dim=32,
    eps=1e-6,
    matrices={"down": (128, 128), "head": (40, 128)},
    fp8_matrices=("down",),
    pow2=True,
    ranks=4,
)
NAMES = {
    "rms_norm": ["norm of heads [32]", "norm of states [128]"],
    "add_rms_norm": ["residual and norm [128]"],
    "rotate": ["rotation [32]"],
    "silu_mul": ["silu times up [128]"],
    "linear": ["product head [40, 128]"],
    "fp8_linear": ["FP8 product down [128, 128]"],
    "attention": ["attention [4, 2, 32]"],
    "sum_in_rank_order": ["sum over 4 ranks [128]"],
    "log_softmax": ["log-softmax"],
}
CPU = torch.device("cpu")


def check(trainer: module.Fingerprint, engines: module.Fingerprint) -> None:
    none = frozenset[str]()
    check_fingerprints(PolicyDescription(*[none] * 5, trainer), EngineDescription(none, none, engines))


@pytest.fixture(scope="module")
def expected() -> module.Fingerprint:
    return module.fingerprint(SHAPES, CPU)


def test_it_repeats_and_covers_every_operation(expected):
    assert module.fingerprint(SHAPES, CPU) == expected
    assert {name for name, _ in expected} == {name for names in NAMES.values() for name in names}
    check(expected, expected)


@pytest.mark.parametrize("operation", NAMES)
def test_an_operation_with_one_other_bit_is_named(operation, expected, monkeypatch):
    real, calls = getattr(module, operation), []

    def change_last_bit(*args):
        out = real(*args)
        first = out[0] if isinstance(out, tuple) else out
        if not calls:
            bits = first.view(torch.int16 if first.element_size() == 2 else torch.int32).view(-1)
            bits[-1] ^= 1
        if operation != "rms_norm":  # it stands for two
            calls.append(1)
        return out

    monkeypatch.setattr(module, operation, change_last_bit)
    found = module.fingerprint(SHAPES, CPU)
    with pytest.raises(UserError) as refusal:
        check(expected, found)
    assert f"do not compute the same bits in {', '.join(NAMES[operation])}: give both" in str(refusal.value)


def test_a_kernel_whose_rows_depend_on_the_batch_is_found(expected):
    def product(x, weight, pow2):
        out = module.shared_fp8_product(x, weight, pow2)
        return out * (1.0 if len(x) == 1 else 1.01)

    found = module.fingerprint(SHAPES, CPU, module.Functions(product))
    with pytest.raises(UserError, match="same bits in FP8 product down"):
        check(expected, found)


def test_an_expert_is_fingerprinted_by_the_kernel_for_experts():
    shapes = replace(SHAPES, experts=4, experts_per_token=2)

    def product(x, weight, pow2):
        return module.shared_fp8_product(x, weight, pow2) * 1.01

    found = module.fingerprint(shapes, CPU, module.Functions(expert_product=product))
    with pytest.raises(UserError, match="same bits in FP8 product down"):
        check(module.fingerprint(shapes, CPU), found)
    engine = module.fingerprint(shapes, CPU, module.Functions(expert_product=expert_product))
    check(module.fingerprint(shapes, CPU), engine)


def test_attention_on_an_fp8_cache_covers_codes_and_their_reading(expected, monkeypatch):
    shapes, name = replace(SHAPES, fp8_cache=True), "attention on E4M3 [4, 2, 32]"
    real = module.write_pages
    found = module.fingerprint(shapes, CPU)
    assert {operation for operation, _ in found} - {operation for operation, _ in expected} == {name}

    def write_with_another_code(key, value, k_cache, *further):
        real(key, value, k_cache, *further)
        k_cache.view(torch.uint8)[-1] ^= 1

    monkeypatch.setattr(module, "write_pages", write_with_another_code)
    with pytest.raises(UserError, match=rf"same bits in {re.escape(name)}: give both"):
        check(found, module.fingerprint(shapes, CPU))


@pytest.mark.parametrize("fp8_cache", [False, True], ids=["dense", "E4M3"])
def test_attention_in_a_window_is_an_operation_of_its_own(fp8_cache, monkeypatch):
    """Also a kernel is found that is right for all rows but those whose walk leaves a block out."""
    shapes = replace(SHAPES, fp8_cache=fp8_cache, kv_window=100)
    name = f"attention{' on E4M3' * fp8_cache} in a window [4, 2, 32]"
    found = module.fingerprint(shapes, CPU)
    assert name in {operation for operation, _ in found}
    check(found, module.fingerprint(replace(shapes, kv_window=7), CPU))
    real = module.attention

    def attention(q, *further, prompt_lengths, window):
        out, lse = real(q, *further, prompt_lengths=prompt_lengths, window=window)
        late = further[4][:1] - window >= 2 * module.BLOCK_KEYS
        return torch.cat([out[:-1], torch.where(late, out[-1:] + 2**-7, out[-1:])]), lse

    monkeypatch.setattr(module, "attention", attention)
    with pytest.raises(UserError, match=rf"same bits in {re.escape(name)}: give both"):
        check(found, module.fingerprint(shapes, CPU))


def test_what_is_fp8_on_one_side_alone_is_left_out(tmp_path):
    make_tiny(tmp_path / "tiny", "add", 0, "qwen3")
    paths = (f"policy.model_name={tmp_path}/tiny/model", f"data.train.data_path={tmp_path}/tiny/data.jsonl")
    names = {}
    for flow in ("fp8_e2e", "fp8_rollout", "bf16"):
        cfg = load(RECIPES / "tiny_cpu.yaml", [*paths, f"nemo_fp8rl.flow={flow}"])
        shapes = operation_shapes(read_hf_config(cfg.policy.model_name), cfg)
        names[flow] = list(shapes.matrices), shapes.fp8_matrices
    linears = ["qkv", "o", "gate_up", "down"]
    assert names["fp8_e2e"] == ([*linears, "head"], tuple(linears))
    assert names["fp8_rollout"] == (["head"], ())
    assert names["bf16"] == ([*linears, "head"], ())


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The doctor's view of a tiny model, in the place of NeMo RL's recipe."""
    make_tiny(tmp_path / "tiny", "add", 0, "qwen3")
    paths = (f"policy.model_name={tmp_path}/tiny/model", f"data.train.data_path={tmp_path}/tiny/data.jsonl")
    cfg = load(RECIPES / "tiny_cpu.yaml", [*paths, "nemo_fp8rl.align=vllm"])
    monkeypatch.setattr(
        doctor, "package_config", lambda plan: nullcontext((read_hf_config(cfg.policy.model_name), cfg))
    )


def test_the_doctor_runs_it_alone_on_a_node_with_a_gpu(tiny, monkeypatch):
    (finding,) = doctor.check_fingerprints(None)
    assert (finding.level, finding.text) == (
        "error",
        "--fingerprint runs the operations: start it on a node with a GPU",
    )
    monkeypatch.setattr(doctor, "has_gpu", lambda: True)
    (finding,) = doctor.check_fingerprints(None)
    assert finding.level == "ok"
    assert "trainer and engine compute the same bits in 1" in finding.text
    real, calls = module.silu_mul, []

    def other_bit_in_the_engine(gate_up):
        calls.append(1)
        return real(gate_up) if len(calls) <= len(module.ROWS["cpu"]) else real(gate_up) * 1.01

    monkeypatch.setattr(module, "silu_mul", other_bit_in_the_engine)
    (finding,) = doctor.check_fingerprints(None)
    assert finding.level == "error"
    assert finding.text == "trainer and engine do not compute the same bits in silu times up [512]"
