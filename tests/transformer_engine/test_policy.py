"""A policy with Transformer Engine's layers, built as on a GPU, equals one with emulated layers to the bit."""

from pathlib import Path

import pytest
import torch

from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.hf.adapters import NO_ADAPTERS
from nemo_fp8rl.policy.layers.linears import Fp8MatmulLayer
from nemo_fp8rl.policy.model import PolicyModel, build_model, transformer_config
from nemo_fp8rl.policy.on_cpu.megatron_on_cpu import megatron_on_cpu
from nemo_fp8rl.policy.rank.process_groups import make_layout
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from nemo_fp8rl.policy.weights.hf_names import to_hf
from tests.transformer_engine.fake_kernels import fake_hopper
from tests.transformer_engine.test_worker import SIZES

pytestmark = pytest.mark.transformer_engine


@pytest.fixture
def worker():
    made = MegatronWorker()
    yield made
    made.shutdown()


FIRST_IN_BF16 = "policy.generation.vllm_cfg.num_first_layers_in_bf16=1"


@pytest.mark.parametrize(
    ("family", "override", "fp8_layers"),
    [
        ("qwen3", "nemo_fp8rl.flow=fp8_e2e", 2),
        ("llama", "nemo_fp8rl.scale_format=fp32", 2),
        ("qwen2", "nemo_fp8rl.flow=fp8_e2e", 2),
        ("qwen3_moe", "nemo_fp8rl.flow=fp8_e2e", 2),
        ("qwen3_moe", FIRST_IN_BF16, 1),
        ("qwen3_moe", "nemo_fp8rl.flow=bf16", 0),
    ],
)
def test_logits_and_gradients_are_those_of_the_emulated_policy(
    recipe, worker, tmp_path: Path, family, override, fp8_layers
):
    write_model(tmp_path / "model", seed=3, family=family, **SIZES.get(family, {}))
    cfg = recipe(f"policy.model_name={tmp_path}/model", "nemo_fp8rl.align=none", override)
    worker.setup(cfg, 0, 1, None)

    def build(grouped_experts: bool) -> PolicyModel:
        layout = make_layout(worker.hf, cfg.policy.megatron_cfg, NO_ADAPTERS, grouped_experts)
        return build_model(transformer_config(worker.hf, cfg.policy, cfg.nemo_fp8rl), layout, cfg, None)

    with megatron_on_cpu():
        emulated = build(grouped_experts=False)
        with fake_hopper():
            model = build(grouped_experts=True)
    fp8 = [type(module).__name__ for module in model.modules() if isinstance(module, Fp8MatmulLayer)]
    assert len(fp8) == 4 * fp8_layers
    assert all(name.startswith("Fp8TE") for name in fp8)
    assert model.config.moe_permute_fusion is (family == "qwen3_moe")
    ids = torch.randint(1, 64, (3, 41), generator=torch.Generator().manual_seed(0))
    weights = torch.randn(3, 41, worker.hf.vocab_size, generator=torch.Generator().manual_seed(1))

    def gradients(policy_model: PolicyModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logits = (
            policy_model(ids, torch.arange(41).expand_as(ids), None).to(policy_model.head.dtype) @ policy_model.head.t()
        )
        (logits.float().log_softmax(-1) * weights).mean().backward()
        grads = {name: parameter.grad for name, parameter in policy_model.named_parameters()}
        return logits, dict(to_hf(policy_model.layout, grads.__getitem__))

    with megatron_on_cpu():
        expected, expected_gradients = gradients(emulated)
        with fake_hopper():
            logits, actual = gradients(model)
    assert torch.equal(logits, expected)
    assert actual.keys() == expected_gradients.keys()
    different = [name for name, gradient in actual.items() if not torch.equal(gradient, expected_gradients[name])]
    assert not different
