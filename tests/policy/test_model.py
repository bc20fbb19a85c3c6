"""The Megatron model equals the HF model."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_fp8rl.assemble import NONE_ON_GPU, describe_alignments
from nemo_fp8rl.batch import SequenceBatch
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.config.fp8rl_schema import Fp8RlConfig
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.ops.alignment import choose_alignment
from nemo_fp8rl.policy import layer_specs, model
from nemo_fp8rl.policy.layers.linears import bf16_linears
from nemo_fp8rl.policy.layers.rope import read_rope
from nemo_fp8rl.policy.model import transformer_config
from nemo_fp8rl.policy.on_cpu.megatron_on_cpu import megatron_on_cpu
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from nemo_fp8rl.policy.weights import checkpoint, hf_names
from nemo_fp8rl.policy.weights.hf_names import to_hf
from tests.conftest import LLAMA3_ROPE, YARN
from tests.policy.sent import sent_tensors

SIZES = [
    {"tie_word_embeddings": False},
    {
        "tie_word_embeddings": True,
        "hidden_size": 192,
        "head_dim": 64,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    },
    {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 96, "vocab_size": 97},
    {"family": "llama"},
    {"family": "llama", "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    {"family": "llama", "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0}},
    {"family": "qwen3", "rope_parameters": YARN},
    {"family": "qwen3_moe"},
    {"family": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 96},
    {"family": "qwen2"},
    {"family": "qwen2", "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16},
]


@pytest.mark.parametrize(
    ("align", "on_gpu", "expected"),
    [
        *(("auto", False, "vllm_cpu"), ("vllm", False, "vllm_cpu"), ("none", False, "none")),
        *(("auto", True, "none"), ("vllm", True, "shared_ops"), ("none", True, "none")),
    ],
)
def test_the_device_decides_how_trainer_and_engine_are_aligned(monkeypatch, align, on_gpu, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    assert choose_alignment(Fp8RlConfig(align=align)) == expected


@pytest.mark.parametrize(("align", "said"), [("auto", NONE_ON_GPU), ("none", "none")])
def test_a_run_says_why_auto_leaves_a_gpu_without_alignment(recipe, align, said):
    cfg = recipe(f"nemo_fp8rl.align={align}")
    assert describe_alignments(frozenset(["none"]), cfg) == said
    assert describe_alignments(frozenset(["shared_ops"]), cfg) == "shared_ops"


@pytest.mark.parametrize("align", ["vllm", "none"])
@pytest.mark.parametrize("sizes", SIZES)
def test_fp32_logits_and_gradients_equal_hf(recipe, tmp_path: Path, sizes, align):
    write_model(tmp_path / "model", seed=3, **sizes)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    worker = MegatronWorker()
    worker.setup(
        recipe(
            f"policy.model_name={tmp_path}/model",
            "policy.precision=float32",
            "nemo_fp8rl.flow=bf16",
            f"nemo_fp8rl.align={align}",
        ),
        0,
        1,
        None,
    )
    ids = torch.randint(1, 64, (3, 41), generator=torch.Generator().manual_seed(0))  # HF: no gradient for the pad, 0
    slopes = torch.randn(3, 41, 1, generator=torch.Generator().manual_seed(1))
    with megatron_on_cpu():
        worker.ddp.zero_grad_buffer()
        logits = worker.ddp(ids, torch.arange(41).expand_as(ids), None) @ worker.model.head.t()
        (logits.log_softmax(-1) * slopes).mean().backward()
    expected = hf(ids).logits
    (expected.log_softmax(-1) * slopes).mean().backward()
    assert (logits - expected).abs().max() < 1e-5
    gradients = dict(
        to_hf(worker.layout, {name: p.main_grad for name, p in worker.model.named_parameters()}.__getitem__)
    )
    for name, parameter in hf.named_parameters():
        if name in gradients:  # transformers stacks experts
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6 * _norm([parameter.grad]))
    assert abs(_norm(gradients.values()) / _norm(p.grad for p in hf.parameters()) - 1) < 1e-5


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return sum(t.double().square().sum() for t in tensors).sqrt().item()


def test_yarn_lengthens_the_context(tmp_path: Path):
    write_model(tmp_path / "model", rope_parameters=YARN)
    assert read_hf_config(tmp_path / "model").max_position_embeddings == 256


def test_rope_is_read_from_the_keys_of_released_checkpoints(tmp_path: Path):
    """Llama 3.1's config.json has rope_theta and rope_scaling; transformers 5 writes rope_parameters."""
    write_model(tmp_path / "new", family="llama", rope_parameters=LLAMA3_ROPE)
    write_model(tmp_path / "old", family="llama")
    path = tmp_path / "old/config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    path.write_text(json.dumps({**config, "rope_theta": LLAMA3_ROPE["rope_theta"], "rope_scaling": scaling}))
    old, new = (read_rope(folder, read_hf_config(folder)).inv_freq for folder in (path.parent, tmp_path / "new"))
    assert torch.equal(old, new)
    plain = 500_000.0 ** -(torch.arange(0, 128, 2) / 128)
    assert torch.allclose(new[0], plain[0]) and torch.allclose(new[-1], plain[-1] / 8)  # fast, slow


def test_export_returns_the_checkpoint_bit_for_bit(recipe, tiny):
    worker = MegatronWorker()
    worker.setup(recipe(), 0, 1, None)
    hf = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.bfloat16).state_dict()
    exported = dict(worker.weights().for_checkpoint())
    assert set(exported) == set(hf)
    assert all(torch.equal(exported[name], hf[name]) for name in hf)


def test_weights_from_a_checkpoint_need_no_random_numbers(recipe):
    cfg = recipe()
    config = transformer_config(read_hf_config(cfg.policy.model_name), cfg.policy, cfg.nemo_fp8rl)
    before = torch.get_rng_state()
    for init in (config.init_method, config.output_layer_init_method, config.embedding_init_method):
        weight = torch.full((3, 5), 7.0)
        init(weight)
        assert (weight == 7).all()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "sizes",
    [
        {"family": "qwen3", "tie_word_embeddings": True},
        {"family": "qwen2", "tie_word_embeddings": False},
        {"family": "qwen3_moe"},
    ],
)
def test_the_checkpoint_sets_every_number_of_every_weight(recipe, tmp_path, monkeypatch, sizes):
    def spoil(weight: torch.Tensor) -> None:
        spoilt.append(weight.detach().fill_(torch.nan))

    spoilt: list[torch.Tensor] = []
    monkeypatch.setattr(model, "skip_init", spoil)
    write_model(tmp_path / "model", vocab_size=97, **sizes)
    worker = MegatronWorker()
    worker.setup(recipe(f"policy.model_name={tmp_path}/model"), 0, 1, None)
    assert spoilt
    assert all(parameter.isfinite().all() for parameter in worker.model.parameters())


@pytest.mark.parametrize(("change", "why"), [("missing", "without a checkpoint tensor"), ("short", "for a parameter")])
def test_a_weight_that_the_checkpoint_does_not_set_is_an_error(recipe, monkeypatch, change, why):
    def change_tensors(layout, get):
        first, *rest = hf_names.from_hf(layout, get)
        return iter(rest if change == "missing" else [(first[0], first[1][:1]), *rest])

    monkeypatch.setattr(checkpoint, "from_hf", change_tensors)
    with pytest.raises(AssertionError, match=why):
        MegatronWorker().setup(recipe(), 0, 1, None)


@pytest.mark.parametrize(("head_dim", "heads"), [(128, 4), (64, 8), (192, 4)])
def test_fp8_trainer_multiplies_exactly_the_bytes_it_exports(recipe, tmp_path, head_dim, heads):
    """No log-prob of the FP8 trainer changes a bit when each weight takes the value of its exported bytes."""
    sizes = {"head_dim": head_dim, "num_attention_heads": heads, "num_key_value_heads": heads // 2}
    write_model(tmp_path / "model", **sizes)
    worker = MegatronWorker()
    worker.setup(recipe("nemo_fp8rl.flow=fp8_e2e", f"policy.model_name={tmp_path}/model"), 0, 1, None)
    ids = torch.randint(0, 16, (4, 12), generator=torch.Generator().manual_seed(1))
    batch = SequenceBatch(input_ids=ids, input_lengths=torch.full((4,), 12))
    before = worker.logprobs(batch)
    sent = sent_tensors(worker)
    changed = 0
    for name, weight in worker.weights().for_checkpoint():
        if worker.engine_fp8_layers.quantizes(name):
            scale = sent[name + "_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            value = (sent[name].float() * scale).to(weight.dtype)
            changed += int((value != weight).sum())
            _parameter_view(worker, name).copy_(value)
    assert changed > 10_000  # the weights really moved to the FP8 grid
    assert torch.equal(worker.logprobs(batch), before)


@pytest.mark.parametrize(("flow", "linears"), [("bf16", 0), ("fp8_rollout", 0), ("fp8_e2e", 8)])
def test_flow_decides_which_linears_are_fp8(recipe, flow, linears):
    from nemo_fp8rl.policy.layers.linears import QuantizedMatmul

    worker = MegatronWorker()
    worker.setup(recipe(f"nemo_fp8rl.flow={flow}"), 0, 1, None)
    assert sum(isinstance(module, QuantizedMatmul) for module in worker.model.modules()) == linears


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_flow_in_fp8_does_not_start_without_its_fp8_linears(recipe, tmp_path, monkeypatch, family):
    write_model(tmp_path / "model", family=family)
    monkeypatch.setattr(layer_specs, "quantized_linears", lambda recipe, aligned: bf16_linears(aligned))
    linears = {"qwen3": 8, "qwen3_moe": 36}[family]  # of two layers, with 8 experts
    with pytest.raises(RuntimeError, match=f"flow fp8_e2e asks for {linears} FP8 linear layers, the model has 0"):
        MegatronWorker().setup(recipe(f"policy.model_name={tmp_path}/model"), 0, 1, None)


@pytest.mark.parametrize(("end", "fp8_layer"), [("first", 1), ("last", 0)])
def test_a_bf16_layer_trains_and_travels_in_bf16(recipe, end, fp8_layer):
    from nemo_fp8rl.policy.layers.linears import QuantizedMatmul

    worker = MegatronWorker()
    worker.setup(recipe(f"policy.generation.vllm_cfg.num_{end}_layers_in_bf16=1"), 0, 1, None)
    fp8 = [name for name, module in worker.model.named_modules() if isinstance(module, QuantizedMatmul)]
    assert len(fp8) == 4
    assert all(name.startswith(f"decoder.layers.{fp8_layer}.") for name in fp8)
    sent = sent_tensors(worker)
    in_fp8 = {name for name, tensor in sent.items() if tensor.dtype == torch.float8_e4m3fn}
    assert in_fp8 == {name for name in sent if f"layers.{fp8_layer}." in name and name.endswith("_proj.weight")}
    assert len(in_fp8) == 7


def test_the_shims_restore_torch():
    before = torch.cuda.current_device, torch.cuda.synchronize
    with megatron_on_cpu():
        assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.ones(1, device="cuda").device.type == "cpu"
    assert (torch.cuda.current_device, torch.cuda.synchronize) == before
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(1, device="cuda")


def _parameter_view(worker: MegatronWorker, hf_name: str) -> torch.Tensor:
    """Return a writable view of the part of Megatron's parameter that is this HF weight."""
    hf, (_, _, layer, *_) = worker.hf, hf_name.split(".")
    prefix = f"decoder.layers.{layer}."
    parameters = {name: p.data for name, p in worker.model.named_parameters()}
    if "self_attn.o_proj" in hf_name:
        return parameters[prefix + "self_attention.linear_proj.weight"]
    if "down_proj" in hf_name:
        return parameters[prefix + "mlp.linear_fc2.weight"]
    if "gate_proj" in hf_name or "up_proj" in hf_name:
        return parameters[prefix + "mlp.linear_fc1.weight"].chunk(2)["up_proj" in hf_name]
    times = 1 if hf.head_dim % 128 else hf.num_key_value_heads
    groups = parameters[prefix + "self_attention.linear_qkv.weight"].view(times, -1, hf.hidden_size)
    keys = hf.num_key_value_heads * hf.head_dim // times
    parts = groups.split([groups.size(1) - 2 * keys, keys, keys], 1)
    part = parts["qkv".index(hf_name.split(".")[-2][0])]
    return _Reshaped(part)


class _Reshaped:
    """Writes [rows, K] to a view [groups, rows / groups, K], which cannot be flattened without a copy."""

    def __init__(self, view: torch.Tensor) -> None:
        self.view = view

    def copy_(self, value: torch.Tensor) -> None:
        self.view.copy_(value.view(self.view.shape))
