"""The policy with Transformer Engine's layers on a real GPU; `tests/transformer_engine` runs it on fake kernels."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.batch import RolloutBatch
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.fp8 import quantize_blockwise, scale_name
from nemo_fp8rl.hf.checkpoint_reader import CheckpointReader
from nemo_fp8rl.policy.layers import logprobs
from nemo_fp8rl.policy.layers.linears import Fp8MatmulLayer
from nemo_fp8rl.policy.layers.logprobs import TokenFilter, filter_logits
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from tests.batches import loss_totals, rollout_batch
from tests.policy.sent import sent_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(params=["qwen3", "qwen3_moe"])
def family(request) -> str:
    return request.param


def random_batch() -> RolloutBatch:
    return rollout_batch(
        input_ids=torch.randint(2, 60, (4, 33), generator=torch.Generator().manual_seed(0)),
        input_lengths=torch.full((4,), 33),
        token_mask=torch.ones(4, 33),
    )


@pytest.fixture
def train(recipe, tmp_path: Path, family):
    """Return a function that trains on one batch and returns the losses and the last weights as they are sent."""
    write_model(tmp_path / "model", seed=3, family=family)
    batch = random_batch()

    def run(flow: str, steps: int, load: Path | None = None, save: Path | None = None, fp8_param: bool = False):
        cfg = recipe(
            f"policy.model_name={tmp_path}/model",
            f"nemo_fp8rl.flow={flow}",
            "nemo_fp8rl.align=none",
            f"nemo_fp8rl.fp8_param={fp8_param}",
        )
        worker = MegatronWorker()
        worker.setup(cfg, 0, 1, None)
        try:
            assert any(isinstance(m, Fp8MatmulLayer) for m in worker.model.modules()) == (flow == "fp8_e2e")
            if load is not None:
                worker.load(str(load))
            losses = [worker.train_step(batch, NllLoss(), loss_totals(4.0, 128.0))["loss"] for _ in range(steps)]
            if save is not None:
                worker.save(str(save))
            return losses, sent_tensors(worker), worker.logprobs(batch)
        finally:
            worker.shutdown()

    return run


def test_fp8_training_follows_bf16(train):
    fp8, bf16 = train("fp8_e2e", 30)[0], train("bf16", 30)[0]
    assert fp8[-1] < 0.7 * fp8[0]
    assert fp8[-1] == pytest.approx(bf16[-1], rel=0.25)


def test_training_continues_from_a_checkpoint(train, tmp_path):
    train("fp8_e2e", 3, save=tmp_path / "saved")
    whole, *_ = train("fp8_e2e", 5)
    rest, *_ = train("fp8_e2e", 2, load=tmp_path / "saved")
    assert rest == pytest.approx(whole[3:], rel=1e-3)  # cuBLAS may sum in another order


def test_fp8_parameters_train_as_quantized_weights_do(train, tmp_path):
    plain, *_ = train("fp8_e2e", 5, save=tmp_path / "plain")
    fp8_only, *_ = train("fp8_e2e", 5, save=tmp_path / "held", fp8_param=True)
    assert fp8_only[0] == pytest.approx(plain[0], rel=1e-6)  # cuBLAS may sum in another order
    assert fp8_only == pytest.approx(plain, rel=1e-3)
    again, *_ = train("fp8_e2e", 1, load=tmp_path / "plain", fp8_param=True)
    further, *_ = train("fp8_e2e", 1, load=tmp_path / "plain")
    assert again == pytest.approx(further, rel=1e-6)


@pytest.mark.parametrize("packed", ["false", "true"])
def test_offloaded_memory_is_restored_and_changes_nothing(recipe, tmp_path, family, packed):
    """The loss stays the same after gradients, optimizer and parameters were offloaded; also packed and recomputed."""
    write_model(tmp_path / "model", seed=3, family=family)
    cfg = recipe(
        f"policy.model_name={tmp_path}/model",
        "nemo_fp8rl.flow=fp8_e2e",
        "nemo_fp8rl.align=none",
        f"policy.sequence_packing.enabled={packed}",
        f"policy.megatron_cfg.activation_checkpointing={packed}",
    )
    losses = []
    for offloads in (False, True):
        worker = MegatronWorker()
        worker.setup(cfg, 0, 1, None)
        try:
            parameters = sum(p.numel() for p in worker.model.parameters())
            for _ in range(2):
                losses.append(worker.train_step(random_batch(), NllLoss(), loss_totals(4.0, 128.0))["loss"])
                if offloads:
                    allocated = torch.cuda.memory_allocated()
                    worker.offload_before_refit()
                    freed = worker.offload_after_refit()
                    assert freed >= 18 * parameters  # 2 of the parameters, 4 of gradients, 12 of the optimizer
                    assert allocated - torch.cuda.memory_allocated() >= freed
                    worker.prepare_for_training()
            losses.append(worker.logprobs(random_batch()).sum().item())
        finally:
            worker.shutdown()
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-3)  # cuBLAS may sum in another order


@pytest.mark.parametrize("fp8_param", [False, True])
def test_the_reference_policy_waits_in_pinned_memory(recipe, tmp_path, fp8_param):
    write_model(tmp_path / "model", seed=3)
    worker = MegatronWorker()
    cfg = recipe(
        f"policy.model_name={tmp_path}/model",
        "nemo_fp8rl.align=none",
        f"nemo_fp8rl.fp8_param={fp8_param}",
        "loss_fn.reference_policy_kl_penalty=0.1",
    )
    worker.setup(cfg, 0, 1, None)
    try:
        assert not torch.empty(1).is_pinned()
        assert all(tensor.is_pinned() for tensor in worker.reference.first_weights)
        before = worker.logprobs(random_batch())
        worker.train_step(random_batch(), NllLoss(), loss_totals(4.0, 128.0))
        assert not torch.equal(worker.logprobs(random_batch()), before)
        torch.testing.assert_close(worker.reference_logprobs(random_batch()), before, rtol=1e-6, atol=1e-6)
    finally:
        worker.shutdown()


def test_the_token_filter_takes_as_many_rows_as_fit_a_gpu(monkeypatch):
    """The rows are sorted over the whole vocabulary, and the int64 indices are twice as wide as the values."""
    calls: list[int] = []

    def count_rows(logits: torch.Tensor, *others: Any) -> torch.Tensor:
        calls.append(len(logits))
        return filter_logits(logits, *others)

    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 24, generator=random) for n in (100, 101))
    targets = torch.randint(0, 101, (100,), generator=random)
    expected = logprobs.token_logprobs(hidden, weight, targets, 0.7, 64, token_filter=TokenFilter(20, 0.9))
    monkeypatch.setattr(logprobs, "filter_logits", count_rows)
    monkeypatch.setitem(logprobs.VALUES, "cuda", 1 << 13)
    on_gpu = (tensor.cuda() for tensor in (hidden, weight, targets))
    actual = logprobs.token_logprobs(*on_gpu, 0.7, 64, token_filter=TokenFilter(20, 0.9))
    assert calls == [40, 24, 36]
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_the_sent_bytes_equal_those_of_a_cpu(train, tmp_path):
    _, sent, _ = train("fp8_e2e", 2, save=tmp_path / "saved")
    with CheckpointReader(tmp_path / "saved" / "weights") as reader:
        names = [name for name, tensor in sent.items() if tensor.dtype is torch.float8_e4m3fn]
        assert names
        for name in names:
            expected = quantize_blockwise(reader.get(name), scale_format="pow2", kernel="reference")
            assert torch.equal(sent[name].cpu().view(torch.uint8), expected.data.view(torch.uint8)), name
            assert torch.equal(sent[scale_name(name)].cpu(), expected.scale_inv), name
