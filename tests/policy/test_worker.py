"""One Megatron rank: log-probs, the optimizer step, and a bitwise resume."""

import gc
import math
import weakref
from dataclasses import replace
from threading import Thread

import pytest
import torch
from torch.overrides import TorchFunctionMode

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.batch import LossTotals, RolloutBatch, SequenceBatch
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.region import full_region
from nemo_fp8rl.hf.model_tensors import expected_tensors
from nemo_fp8rl.hf.storage.part_files import PartReader, PartWriter
from nemo_fp8rl.policy.interface import DivergenceError
from nemo_fp8rl.policy.optimizer.finite_check import overflows
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from nemo_fp8rl.policy.rank_group import MegatronPolicy
from nemo_fp8rl.policy.weights.hf_names import to_hf
from tests.batches import loss_totals, rollout_batch


def random_batch(seed: int, b: int = 8, t: int = 10) -> RolloutBatch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 16, (b, t), generator=generator)
    lengths = torch.randint(4, t + 1, (b,), generator=generator)
    lengths[0] = t
    positions = torch.arange(t)
    mask = ((positions >= 3) & (positions < lengths[:, None])).float()
    return rollout_batch(ids, lengths, mask)


def new_worker(cfg) -> MegatronWorker:
    worker = MegatronWorker()
    worker.setup(cfg, 0, 1, None)
    return worker


def train(worker: MegatronWorker, batch: RolloutBatch) -> dict[str, float]:
    return worker.train_step(batch, NllLoss(), loss_totals(len(batch.input_ids), batch.token_mask[:, 1:].sum()))


def test_logprobs_do_not_read_padding(recipe):
    worker, batch = new_worker(recipe()), random_batch(0)
    inside = batch.token_mask > 0
    expected = worker.logprobs(batch)[inside]
    real = torch.arange(10) < batch.input_lengths[:, None]
    padded = replace(batch, input_ids=torch.where(real, batch.input_ids, 1))
    assert torch.equal(worker.logprobs(padded)[inside], expected)


def test_logprobs_are_a_distribution_and_start_with_zero(recipe):
    worker = new_worker(recipe())
    ids = torch.zeros(64, 2, dtype=torch.int64)
    ids[:, 1] = torch.arange(64)  # every token of the vocabulary after the same prefix
    logprobs = worker.logprobs(SequenceBatch(input_ids=ids, input_lengths=torch.full((64,), 2)))
    assert (logprobs[:, 0] == 0).all()
    assert logprobs[:, 1].exp().sum().item() == pytest.approx(1.0, abs=1e-5)


def test_microbatches_accumulate_to_the_whole_batch(recipe):
    """The model is float32, so that only the order of summation differs."""
    fp32 = ("policy.precision=float32", "nemo_fp8rl.flow=bf16")
    batch = random_batch(1)
    whole = new_worker(recipe(*fp32, "policy.train_micro_batch_size=8", "policy.train_global_batch_size=8"))
    parts = new_worker(recipe(*fp32, "policy.train_micro_batch_size=2", "policy.train_global_batch_size=8"))
    a, b = train(whole, batch), train(parts, batch)
    assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


def test_dynamic_batching_changes_nothing_but_the_order(recipe):
    """With microbatches by tokens, log-probs keep their rows; loss and gradient norm are the whole batch's."""
    fp32 = ("policy.precision=float32", "nemo_fp8rl.flow=bf16", "policy.max_total_sequence_length=64")
    dynamic = ("enabled=true", "train_mb_tokens=64", "logprob_mb_tokens=64", "sequence_length_round=4")
    batch = random_batch(1, b=24, t=20)
    whole = new_worker(recipe(*fp32, "policy.train_micro_batch_size=64"))
    parts = new_worker(recipe(*fp32, *(f"policy.dynamic_batching.{key}" for key in dynamic)))
    assert len(parts.pipeline.microbatches(batch, training=True)) > 3
    inside = batch.token_mask > 0
    torch.testing.assert_close(parts.logprobs(batch)[inside], whole.logprobs(batch)[inside], rtol=1e-5, atol=1e-5)
    a, b = train(whole, batch), train(parts, batch)
    assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


def test_a_clipped_step_scales_the_gradient_and_reports_its_norm(recipe, tmp_path):
    """Adam's first moment after one step is (1 - beta1) times its gradient."""
    clips, key, batch = (0.01, 0), "policy.megatron_cfg.optimizer.clip_grad", random_batch(3)
    clipped, free = (new_worker(recipe(f"{key}={clip}")) for clip in clips)
    norm, unclipped = (train(worker, batch)["grad_norm"] for worker in (clipped, free))
    gradients = dict(to_hf(free.layout, {n: p.main_grad for n, p in free.model.named_parameters()}.__getitem__))
    expected = sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5
    assert norm == unclipped == pytest.approx(expected, rel=1e-5)
    assert norm > 100 * clips[0]
    clipped.save(str(tmp_path / "saved"))
    taken = 1 - clipped.cfg.policy.megatron_cfg.optimizer.adam_beta1
    with PartReader(tmp_path / "saved/optimizer") as reader:
        for name, gradient in gradients.items():
            expected, moment = (
                taken * clips[0] / norm * gradient,
                reader.get(f"{name}.exp_avg", full_region(gradient.shape)),
            )
            torch.testing.assert_close(moment, expected, rtol=1e-4, atol=1e-6 * float(expected.norm()))


@pytest.mark.parametrize(
    ("style", "remainder"),
    [
        ("constant", lambda progress: 1.0),
        ("linear", lambda progress: 1 - progress),
        ("cosine", lambda progress: (1 + math.cos(math.pi * progress)) / 2),
    ],
    ids=["constant", "linear", "cosine"],
)
def test_the_learning_rate_follows_the_recipes_schedule(recipe, style, remainder):
    """Megatron's closed form: linear from lr_warmup_init to lr, then min_lr + remainder * (lr - min_lr)."""
    scheduler = (f"lr_decay_style={style}", "lr_warmup_init=0.0001", "lr_warmup_iters=2", "lr_decay_iters=6")
    keys = ("optimizer.lr=0.001", "optimizer.min_lr=0.0002", *(f"scheduler.{key}" for key in scheduler))
    worker, batch = new_worker(recipe(*(f"policy.megatron_cfg.{key}" for key in keys))), random_batch(3, b=1, t=4)
    rates = [train(worker, batch)["lr"] for _ in range(8)]
    decay = [2e-4 + remainder(min(step / 4, 1)) * 8e-4 for step in range(1, 7)]
    assert rates == pytest.approx([5.5e-4, 1e-3, *decay])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_activation_checkpointing_changes_no_bit(recipe, tmp_path, family):
    write_model(tmp_path / "model", family=family)
    weights, layers = [], []
    for enabled in ("false", "true"):
        worker = new_worker(
            recipe(f"policy.model_name={tmp_path}/model", f"policy.megatron_cfg.activation_checkpointing={enabled}")
        )
        calls: list[int] = []
        worker.model.decoder.layers[0].mlp.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        train(worker, random_batch(3))
        weights.append(dict(worker.weights().for_checkpoint()))
        layers.append(len(calls))
    assert layers == [1, 2]  # it was computed again
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_temperature_divides_the_logits(recipe):
    cold, hot = (new_worker(recipe(f"policy.generation.temperature={t}")) for t in (0.05, 2.0))
    batch = random_batch(2)
    uniform = -torch.log(torch.tensor(64.0))
    spread = [(w.logprobs(batch)[:, 1:] - uniform).abs().mean() for w in (cold, hot)]
    assert spread[1] < spread[0] / 20


def test_training_lowers_the_loss(recipe):
    fast = ("policy.megatron_cfg.optimizer.lr=0.003", "policy.megatron_cfg.scheduler.lr_warmup_iters=0")
    worker = new_worker(recipe(*fast))
    batch = random_batch(3)
    losses = [train(worker, batch)["loss"] for _ in range(15)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "qwen3_moe"])
@pytest.mark.parametrize("flow", ["bf16", "fp8_e2e"])
def test_resume_is_bitwise(recipe, tmp_path, flow, family):
    write_model(tmp_path / "model", family=family)
    cfg = recipe(f"nemo_fp8rl.flow={flow}", f"policy.model_name={tmp_path}/model")
    uninterrupted = new_worker(cfg)
    expected = [train(uninterrupted, random_batch(step)) for step in range(6)]

    first = new_worker(cfg)
    for step in range(3):
        train(first, random_batch(step))
    first.save(str(tmp_path / "checkpoint"))
    resumed = new_worker(cfg)
    resumed.load(str(tmp_path / "checkpoint"))
    assert [train(resumed, random_batch(step)) for step in range(3, 6)] == expected[3:]
    weights, reference = dict(resumed.weights().for_checkpoint()), dict(uninterrupted.weights().for_checkpoint())
    assert all(torch.equal(weights[name], reference[name]) for name in reference)


def test_frozen_routers_stay_and_count_in_no_norm(recipe, tmp_path):
    write_model(tmp_path / "model", family="qwen3_moe")
    keys = (f"policy.model_name={tmp_path}/model", "policy.megatron_cfg.optimizer.clip_grad=1000.0")
    frozen, free = (new_worker(recipe(*keys, f"policy.megatron_cfg.freeze_moe_router={f}")) for f in ("true", "false"))
    before = {name: part.clone() for name, part in frozen.weights().for_checkpoint()}
    norm, whole = (train(worker, random_batch(0))["grad_norm"] for worker in (frozen, free))
    routers = [p.main_grad.norm() for name, p in free.model.named_parameters() if ".router." in name]
    assert len(routers) == 2 and norm < whole
    assert norm**2 + sum(float(r) ** 2 for r in routers) == pytest.approx(whole**2, rel=1e-5)
    moved = {name for name, now in frozen.weights().for_checkpoint() if not torch.equal(now, before[name])}
    assert "model.layers.1.self_attn.o_proj.weight" in moved
    assert not any(name.endswith("mlp.gate.weight") for name in moved)


def test_frozen_routers_resume_and_may_be_freed(recipe, tmp_path):
    write_model(tmp_path / "model", family="qwen3_moe")
    keys = (f"policy.model_name={tmp_path}/model", "policy.megatron_cfg.freeze_moe_router=true")
    first = new_worker(recipe(*keys))
    train(first, random_batch(0))
    first.save(str(tmp_path / "saved"))
    train(first, random_batch(1))
    second = new_worker(recipe(*keys))
    second.load(str(tmp_path / "saved"))
    train(second, random_batch(1))
    resumed = dict(second.weights().for_checkpoint())
    assert all(torch.equal(part, resumed[name]) for name, part in first.weights().for_checkpoint())
    freed = new_worker(recipe(keys[0]))
    freed.load(str(tmp_path / "saved"))
    before = {name: part.clone() for name, part in freed.weights().for_checkpoint()}
    train(freed, random_batch(1))
    for name, now in freed.weights().for_checkpoint():
        if name.endswith("mlp.gate.weight"):
            assert not torch.equal(now, before[name])
            torch.testing.assert_close(now, before[name], rtol=0.1, atol=0.01)


def test_an_incomplete_checkpoint_is_refused(recipe, tmp_path):
    worker = new_worker(recipe())
    worker.save(str(tmp_path / "checkpoint"))
    (tmp_path / "checkpoint/optimizer/rank_0.safetensors").unlink()
    with pytest.raises(UserError, match=r"does not hold all of .*embed_tokens.*not complete"):
        worker.load(str(tmp_path / "checkpoint"))


def test_the_optimizer_of_a_wider_model_is_refused(recipe, tmp_path):
    worker = new_worker(recipe())
    worker.save(str(tmp_path / "checkpoint"))
    wider = PartWriter(tmp_path / "checkpoint/optimizer", "rank_0")
    for name, shape in expected_tensors(worker.hf).items():
        wider.add(f"{name}.master", torch.zeros([2 * size for size in shape]))
    wider.close()
    with pytest.raises(UserError, match=r"weight.master ends at .*, but in this model .* has shape"):
        worker.load(str(tmp_path / "checkpoint"))


def test_sequences_are_counted_as_in_nemo_rl(recipe):
    """A sequence without a token of an answer also counts; NeMo RL keeps such sequences of failed generations."""
    policy, batch, counts = MegatronPolicy(recipe()), random_batch(4), set[tuple[float, float]]()

    def loss(logprobs: torch.Tensor, part: RolloutBatch, totals: LossTotals, _: torch.Tensor | None):
        counts.add((float(totals.valid_seqs), float(totals.valid_toks)))
        return NllLoss()(logprobs, part, totals)

    batch.token_mask[0] = batch.sample_mask[1] = 0
    policy.train_step(batch, loss)
    assert counts == {(7.0, float(batch.token_mask[2:].sum()))}
    policy.shutdown()


def test_fully_masked_batch_is_refused(recipe):
    policy = MegatronPolicy(recipe())
    batch = random_batch(4)
    with pytest.raises(ValueError, match="no token to train on"):
        policy.train_step(replace(batch, sample_mask=torch.zeros(8)), NllLoss())
    policy.shutdown()


@pytest.mark.parametrize("method", ["logprobs", "reference_logprobs"])
def test_another_thread_waits_while_the_weights_are_locked(recipe, method):
    """A refit locks the weights, because the reference policy's weights replace them during its forward."""
    policy = MegatronPolicy(recipe("loss_fn.reference_policy_kl_penalty=0.1"))
    answers: list[torch.Tensor] = []
    asking = Thread(target=lambda: answers.append(getattr(policy, method)(random_batch(4))))
    with policy.hold_weights():
        asking.start()
        asking.join(2)
        assert not answers
    asking.join()
    assert answers[0].shape == (8, 10)
    policy.shutdown()


def test_a_step_that_diverges_changes_no_weight_and_no_schedule(recipe):
    worker, batch = new_worker(recipe("policy.megatron_cfg.scheduler.lr_warmup_iters=10")), random_batch(5)
    first = train(worker, batch)["lr"]
    before = {name: weight.clone() for name, weight in worker.weights().for_checkpoint()}

    def diverging(logprobs, *_):
        return logprobs.sum() * float("nan"), {"loss": 0.0}

    with pytest.raises(DivergenceError, match="no weight was moved"):
        worker.train_step(batch, diverging, loss_totals(8.0, 1.0))
    assert all(torch.equal(weight, before[name]) for name, weight in worker.weights().for_checkpoint())
    assert train(worker, batch)["lr"] == pytest.approx(2 * first)


def test_gradients_are_checked_in_one_read_and_no_nan_is_missed(recipe):
    class Looks(TorchFunctionMode):
        """Records reads of tensors; each waits for a GPU."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            made.append(func)
            return func(*args, **(kwargs or {}))

    made: list = []
    worker, batch = new_worker(recipe()), random_batch(5)
    train(worker, batch)
    with Looks():
        overflows({}, worker.ddp)
    assert made.count(torch.Tensor.__bool__) == made.count(torch.Tensor.tolist) == 1  # gradients; what all ranks say
    parameters = list(worker.ddp.parameters())
    for bad in (math.nan, math.inf, -math.inf):
        for gradient in (parameters[0].main_grad, parameters[-1].main_grad):
            last = gradient.flatten()[-1].clone()
            gradient.view(-1)[-1] = bad
            with pytest.raises(DivergenceError):
                overflows({}, worker.ddp)
            gradient.view(-1)[-1] = last
    overflows({}, worker.ddp)


def test_reference_logprobs_never_change_and_change_nothing(recipe):
    cfg = recipe("loss_fn.reference_policy_kl_penalty=0.1", "policy.megatron_cfg.optimizer.lr=0.01")
    worker, batch = new_worker(cfg), random_batch(3)
    start = worker.logprobs(batch)
    assert torch.equal(worker.reference_logprobs(batch), start)
    for _ in range(2):
        train(worker, batch)
    moved = worker.logprobs(batch)
    assert not torch.equal(moved, start)
    assert torch.equal(worker.reference_logprobs(batch), start)
    assert torch.equal(worker.logprobs(batch), moved)
    train(worker, batch)  # Megatron's buffers, of which the parameters are views, are in place
    assert not torch.equal(worker.logprobs(batch), moved)


def test_reference_logprobs_ignore_the_engines_experts_and_cache(recipe, tmp_path):
    write_model(tmp_path / "model", family="qwen3_moe")
    cfg = recipe(
        f"policy.model_name={tmp_path}/model",
        "loss_fn.reference_policy_kl_penalty=0.1",
        "policy.generation.vllm_cfg.kv_cache_dtype=fp8",
    )
    worker, batch = new_worker(cfg), random_batch(3)
    start = worker.logprobs(batch)
    worker.calibrate_kv(batch)
    routed = replace(batch, routed_experts=torch.zeros(8, 10, 2, 2, dtype=torch.int16))
    assert not torch.equal(worker.logprobs(routed), start)
    assert torch.equal(worker.reference_logprobs(routed), start)
    assert worker.kv_cache.scales is not None


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_offload_frees_the_gradients_and_changes_no_bit(recipe, tmp_path, family):
    write_model(tmp_path / "model", family=family)
    cfg = recipe(f"policy.model_name={tmp_path}/model")
    plain, worker = new_worker(cfg), new_worker(cfg)
    parameters = sum(p.numel() for p in worker.model.parameters())
    for step in range(3):
        expected = train(plain, random_batch(step))
        worker.prepare_for_training()
        assert train(worker, random_batch(step)) == expected
        freed = worker.offload_after_refit()
        assert 4 * parameters <= freed <= 4.1 * parameters  # float32, and what the buffers pad
        assert worker.ddp.buffers[0].grad_data.untyped_storage().nbytes() == 0
        assert worker.offload_after_refit() == freed
        assert torch.equal(worker.logprobs(random_batch(9)), plain.logprobs(random_batch(9)))


def test_shutdown_destroys_the_process_groups(recipe):
    """Each group has threads, which would accumulate in a process that builds many policies."""
    groups = []
    for _ in range(3):
        new_worker(recipe()).shutdown()
        groups.append(len(torch.distributed.distributed_c10d._world.pg_map))
    assert groups[0] == groups[1] == groups[2]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_unreferenced_policy_is_freed_after_training(recipe, tmp_path, family):
    write_model(tmp_path / "model", family=family)
    worker = new_worker(recipe(f"policy.model_name={tmp_path}/model"))
    train(worker, random_batch(0))
    model = weakref.ref(worker.model)
    worker.shutdown()
    del worker
    gc.collect()
    assert model() is None
