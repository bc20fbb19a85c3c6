"""A rank that trains as on a GPU, with Transformer Engine's layers and Adam in the place of emulation and torch's."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.batch import RolloutBatch
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.policy.on_cpu.megatron_on_cpu import megatron_on_cpu
from nemo_fp8rl.policy.rank.process_groups import start_process_groups
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from nemo_fp8rl.policy.weights.optimizer_state import _adam_step_counts, _set_steps
from tests.batches import loss_totals, rollout_batch
from tests.conftest import HALF_HEADS
from tests.policy.sent import sent_tensors
from tests.transformer_engine.fake_kernels import fake_hopper

pytestmark = pytest.mark.transformer_engine
SIZES = {"llama": HALF_HEADS}
"""Sizes by family that differ from those of `write_model`."""


@contextmanager
def rank(cfg, gpu: bool) -> Iterator[MegatronWorker]:
    worker = MegatronWorker()
    start_process_groups(0, 1, None, None)  # gloo alone: there is no NCCL
    with ExitStack() as stack:
        if gpu:
            stack.enter_context(megatron_on_cpu())
            stack.enter_context(fake_hopper())
        stack.callback(worker.shutdown)
        worker.setup(cfg, 0, 1, None)
        yield worker


def batch(seed: int) -> RolloutBatch:
    ids = torch.randint(2, 60, (4, 33), generator=torch.Generator().manual_seed(seed))
    return rollout_batch(
        input_ids=ids,
        input_lengths=torch.tensor([33, 12, 33, 20]),
        token_mask=(torch.arange(33) < torch.tensor([33, 12, 33, 20])[:, None]).float(),
    )


def step(worker: MegatronWorker, seed: int) -> dict[str, float]:
    return worker.train_step(batch(seed), NllLoss(), loss_totals(4.0, batch(seed).token_mask[:, 1:].sum()))


@pytest.fixture(params=["qwen3", "qwen3_moe", "llama-fp8_param", "qwen3_moe-fp8_param"])
def cfg(recipe, tmp_path, request):
    family, _, fp8_param = request.param.partition("-")
    write_model(tmp_path / "model", seed=3, family=family, **SIZES.get(family, {}))
    return recipe(
        f"policy.model_name={tmp_path}/model",
        "nemo_fp8rl.flow=fp8_e2e",
        f"nemo_fp8rl.fp8_param={bool(fp8_param)}",
        "nemo_fp8rl.align=none",
        "policy.sequence_packing.enabled=true",
    )


def test_a_step_is_that_of_the_emulation(cfg):
    from transformer_engine.pytorch.optimizers import FusedAdam

    with rank(cfg, gpu=False) as worker:
        expected_logprobs, expected, bytes_ = worker.logprobs(batch(0)), step(worker, 0), sent_tensors(worker)
    with rank(cfg, gpu=True) as worker:
        optimizers = getattr(worker.optimizer, "chained_optimizers", [worker.optimizer])
        assert {type(part.optimizer) for part in optimizers} == {FusedAdam}
        logprobs, metrics, sent = worker.logprobs(batch(0)), step(worker, 0), sent_tensors(worker)
    assert torch.equal(logprobs, expected_logprobs)
    assert metrics["loss"] == expected["loss"]
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert sent.keys() == bytes_.keys()
    equal_bytes = sum((sent[name].view(torch.uint8) == bytes_[name].view(torch.uint8)).sum().item() for name in sent)
    assert equal_bytes > 0.99 * sum(tensor.nbytes for tensor in sent.values())  # the two Adams round differently


def give(worker: MegatronWorker, gpu: bool) -> None:
    """Offload all memory; on a GPU also the parameters'."""
    worker.offload_before_refit()
    assert (worker.offload_after_refit() > worker.offload.offloaded_bytes["training"]) == gpu
    for buffer in worker.offload.buffers if gpu else ():
        assert buffer.param_data.untyped_storage().nbytes() == buffer.grad_data.untyped_storage().nbytes() == 0


def test_recomputed_offloaded_and_with_a_reference_policy(recipe, cfg):
    cfg = recipe(
        f"policy.model_name={cfg.policy.model_name}",
        "nemo_fp8rl.align=none",
        "policy.megatron_cfg.activation_checkpointing=true",
        "loss_fn.reference_policy_kl_penalty=0.1",
    )
    losses_of_runs = []
    for gpu, offloads in ((False, True), (True, True), (True, False)):
        with rank(cfg, gpu) as worker:
            start, first = worker.reference_logprobs(batch(0)), step(worker, 0)["loss"]
            if offloads:
                give(worker, gpu)
                assert torch.equal(worker.reference_logprobs(batch(0)), start)  # it takes what it reads
                give(worker, gpu)
                worker.prepare_for_training()
            second = step(worker, 0)["loss"]
            assert torch.equal(worker.reference_logprobs(batch(0)), start)
            assert second < first
            losses_of_runs.append((start, first, second))
    (expected_start, *expected), (start, *losses), (_, *undisturbed) = losses_of_runs
    assert losses == undisturbed
    assert torch.equal(start, expected_start)
    assert losses[0] == expected[0]
    assert losses[1] == pytest.approx(expected[1], rel=1e-3)  # the two Adams round differently


@pytest.mark.parametrize("cfg", ["llama-fp8_param", "qwen3_moe-fp8_param"], indirect=True)
def test_a_refit_has_no_columns_beside_it(cfg):
    def columns(worker: MegatronWorker) -> int:
        """Count the FP8 weights with columns."""
        return sum(getattr(parameter, "_columnwise_data", None) is not None for parameter in worker.model.parameters())

    with rank(cfg, gpu=True) as worker:
        first, bytes_, all_of_them = step(worker, 0)["loss"], sent_tensors(worker), columns(worker)
        assert all_of_them
        worker.offload_before_refit()
        assert worker.offload.offloaded_bytes["columns"]
        for _ in range(2):
            sent = sent_tensors(worker)
            worker.weight_squares()
            assert columns(worker) == 0
            assert all(torch.equal(sent[name].view(torch.uint8), bytes_[name].view(torch.uint8)) for name in bytes_)
            worker.offload_after_refit()
        logprobs = worker.logprobs(batch(0))
        assert columns(worker) == all_of_them
        worker.prepare_for_training()
        second = step(worker, 0)["loss"]
    with rank(cfg, gpu=True) as worker:
        assert step(worker, 0)["loss"] == first
        assert torch.equal(worker.logprobs(batch(0)), logprobs)
        assert step(worker, 0)["loss"] == second


def test_it_goes_on_from_a_checkpoint_to_the_bit(cfg, tmp_path: Path):
    with rank(cfg, gpu=True) as worker:
        for seed in range(3):
            step(worker, seed)
        worker.save(str(tmp_path / "saved"))
        expected = [step(worker, seed) for seed in (3, 4)]
    with rank(cfg, gpu=True) as worker:
        worker.load(str(tmp_path / "saved"))
        assert [step(worker, seed) for seed in (3, 4)] == expected


OPTIMIZER = "policy.megatron_cfg.optimizer"
FEW_BYTES = ("use_precision_aware_optimizer=true", "exp_avg_dtype=fp8", "exp_avg_sq_dtype=fp16", "lr=0.001")


@pytest.fixture(params=["", "fp8_param"])
def few_bytes(recipe, tmp_path, request):
    """A recipe whose moments have 3 bytes; with fp8_param Megatron keeps the masters, and FusedAdam moments alone."""
    write_model(tmp_path / "model", seed=3, family="llama", **HALF_HEADS)
    return recipe(
        f"policy.model_name={tmp_path}/model",
        "nemo_fp8rl.align=none",
        f"nemo_fp8rl.fp8_param={bool(request.param)}",
        "policy.megatron_cfg.offload_between_phases=true",
        *(f"{OPTIMIZER}.{key}" for key in FEW_BYTES),
    )


def test_states_of_few_bytes_move_to_the_host_and_go_on_to_the_bit(few_bytes, tmp_path: Path):
    """Megatron's own offload would leave the optimizer with copies of the weights, which then never change."""
    from nemo_fp8rl.policy.optimizer.fused_adam import FiniteFusedAdam

    losses_of_runs = []
    for moves in (True, False):
        with rank(few_bytes, gpu=True) as worker:
            assert {type(part.optimizer) for part in worker.optimizer.chained_optimizers} == {FiniteFusedAdam}
            first = step(worker, 0)
            if moves:
                worker.offload_before_refit()
                worker.save(str(tmp_path / "saved"))  # of states on the host
                worker.prepare_for_training()
            weights = [parameter.detach().float().clone() for parameter in worker.model.parameters()]
            losses_of_runs.append([first, *(step(worker, seed) for seed in (0, 1))])
            assert any((p.float() != old).any() for p, old in zip(worker.model.parameters(), weights, strict=True))
    assert losses_of_runs[0] == losses_of_runs[1]
    with rank(few_bytes, gpu=True) as worker:
        worker.load(str(tmp_path / "saved"))
        assert [step(worker, seed) for seed in (0, 1)] == losses_of_runs[0][1:]


def save_on_both(cfg, folder: Path) -> tuple[Path, Path]:
    """Check that a CPU's checkpoint goes on here; return its optimizer's folder and that of its copy by this path."""
    with rank(cfg, gpu=False) as worker:
        step(worker, 0)
        worker.save(str(folder / "saved"))
        expected = step(worker, 1)["loss"]
    with rank(cfg, gpu=True) as worker:
        worker.load(str(folder / "saved"))
        worker.save(str(folder / "again"))
        assert step(worker, 1)["loss"] == expected
    return folder / "saved/optimizer", folder / "again/optimizer"


def test_states_of_few_bytes_go_on_between_cpu_and_gpu(few_bytes, tmp_path: Path):
    saved, again = save_on_both(few_bytes, tmp_path)
    assert (saved / "scales_0.json").read_text() == (again / "scales_0.json").read_text()
    tensors = load_file(saved / "rank_0.safetensors")
    assert all(torch.equal(t, tensors[name]) for name, t in load_file(again / "rank_0.safetensors").items())


def test_a_checkpoint_of_the_emulation_goes_on_here(cfg, tmp_path: Path):
    saved, again = save_on_both(cfg, tmp_path)
    assert (saved / "steps.json").read_text() == (again / "steps.json").read_text()
    tensors = load_file(saved / "rank_0.safetensors")
    assert any(name.endswith("exp_avg_sq") for name in tensors)
    for name, tensor in load_file(again / "rank_0.safetensors").items():
        assert torch.equal(tensor, tensors.pop(name)), name
    assert not tensors


def test_a_float32_checkpoint_is_rounded_before_quantization(recipe, tmp_path: Path):
    write_model(tmp_path / "model", seed=3)
    file = tmp_path / "model" / "model.safetensors"
    save_file({name: tensor.float() * 1.001 for name, tensor in load_file(file).items()}, file)
    logprobs = []
    for fp8_param in ("false", "true"):
        cfg = recipe(
            f"policy.model_name={tmp_path}/model", "nemo_fp8rl.align=none", f"nemo_fp8rl.fp8_param={fp8_param}"
        )
        with rank(cfg, gpu=True) as worker:
            logprobs.append(worker.logprobs(batch(0)))
    assert torch.equal(*logprobs)


def test_float32_experts_are_refused(recipe, tmp_path: Path):
    write_model(tmp_path / "model", seed=3, family="qwen3_moe")
    float32 = ("policy.precision=float32", "nemo_fp8rl.flow=bf16", "nemo_fp8rl.align=none")
    cfg = recipe(f"policy.model_name={tmp_path}/model", *float32)
    with pytest.raises(UserError, match=r"in TF32; set policy\.precision=bfloat16"), rank(cfg, gpu=True):
        pass


def test_float32_scales_are_refused_on_blackwell(recipe, tmp_path: Path, monkeypatch):
    from nemo_fp8rl.policy.layers import te_linears

    write_model(tmp_path / "model", seed=3)
    cfg = recipe(f"policy.model_name={tmp_path}/model", "nemo_fp8rl.align=none", "nemo_fp8rl.scale_format=fp32")
    monkeypatch.setattr(te_linears.te, "is_fp8_block_scaling_available", lambda return_reason: (True, ""))
    with monkeypatch.context() as context:
        context.setattr(te_linears, "BLACKWELL", (9, 0))  # what the fake is
        with pytest.raises(UserError, match=r"set nemo_fp8rl\.scale_format=pow2"), rank(cfg, gpu=True):
            pass
    with rank(cfg, gpu=True):
        pass


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("flow", ["mxfp8_e2e", "nvfp4_e2e", "nvfp4_a16_e2e"])
def test_other_formats_are_emulated_on_a_gpu_as_well(recipe, tmp_path: Path, flow, family):
    from nemo_fp8rl.policy.layers.linears import QuantizedMatmul

    write_model(tmp_path / "model", seed=3, family=family)
    cfg = recipe(f"policy.model_name={tmp_path}/model", "nemo_fp8rl.align=none", f"nemo_fp8rl.flow={flow}")
    with rank(cfg, gpu=False) as worker:
        expected = step(worker, 0)
    with rank(cfg, gpu=True) as worker:
        assert QuantizedMatmul.kernel_name in worker.describe().kernels
        assert not [name for name in worker.describe().kernels if name.startswith("Transformer Engine")]
        metrics = step(worker, 0)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)


def test_transformer_engines_backward_is_the_native_one(recipe, tmp_path: Path):
    write_model(tmp_path / "model", seed=3)
    keys = ("nemo_fp8rl.align=none", "nemo_fp8rl.backward=dequantized")
    with (
        pytest.raises(UserError, match=r"nemo_fp8rl\.backward=dequantized: .* set it to auto"),
        rank(recipe(f"policy.model_name={tmp_path}/model", *keys), gpu=True),
    ):
        pass


@pytest.mark.parametrize("value", ["high_precision", "dequantized", ""])
def test_a_backward_outside_of_fp8_is_refused(recipe, tmp_path: Path, monkeypatch, value):
    from nemo_fp8rl.policy.layers import te_linears

    write_model(tmp_path / "model", seed=3)
    cfg = recipe(f"policy.model_name={tmp_path}/model", "nemo_fp8rl.align=none")
    monkeypatch.setattr(te_linears.Float8BlockScaling, "backward_override", value, raising=False)
    with pytest.raises(UserError, match=f"NVTE_BACKWARD_OVERRIDE={value} takes .* unset it"), rank(cfg, gpu=True):
        pass
    bf16 = recipe(f"policy.model_name={tmp_path}/model", "nemo_fp8rl.align=none", "nemo_fp8rl.flow=bf16")
    with rank(bf16, gpu=True):
        pass


def test_the_variable_is_read_where_it_is_looked_for():
    """The override of each version; 2.14 has none."""
    import transformer_engine

    program = "import tests.transformer_engine.plugin; from nemo_fp8rl.policy.layers.te_linears import *; "
    variables = os.environ | {"NVTE_BACKWARD_OVERRIDE": "dequantized"}
    command = [sys.executable, "-W", "ignore", "-c", program + "print(backward_override())"]
    answer = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout.strip()
    assert answer == ("None" if transformer_engine.__version__.startswith("2.14") else "dequantized")


def test_experts_on_one_rank_need_a_permutation_with_host_counts(recipe, tmp_path: Path, monkeypatch):
    import transformer_engine

    from nemo_fp8rl.policy.layers import te_linears

    write_model(tmp_path / "model", seed=3, family="qwen3_moe")
    cfg = recipe(f"policy.model_name={tmp_path}/model", "nemo_fp8rl.align=none")
    real = te_linears.HOST_COUNTS_VERSION
    with fake_hopper():
        monkeypatch.setattr(te_linears, "HOST_COUNTS_VERSION", real)
        assert bool(te_linears.why_no_allgather()) == transformer_engine.__version__.startswith("2.14")
        monkeypatch.setattr(te_linears, "HOST_COUNTS_VERSION", Version("99"))
        with pytest.raises(UserError, match=r"Transformer Engine 2\..* cannot permute.*expert_model_parallel_size=2"):
            MegatronWorker().setup(cfg, 0, 1, None)


def test_a_group_without_parameters_counts_no_steps():
    """A rank may have no slice of one of Megatron's groups, and Adam skips it."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    with fake_hopper():
        parameter = torch.nn.Parameter(torch.ones(4))
        parameter.grad = torch.ones(4)
        optimizer = SimpleNamespace(optimizer=FusedAdam([{"params": [parameter]}, {"params": []}]))
        _set_steps(optimizer, 3.0)
        optimizer.optimizer.step()
    assert list(_adam_step_counts(optimizer)) == [4.0]
