"""What our policy says to NeMo RL's loop of a batch, and to the gates, with a fake in place of what trains."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_fp8rl.algorithms.gates import GateConfig
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.workers import WorkerDied
from tests.nemo_rl import runs

pytestmark = [pytest.mark.nemo_rl, runs.needs_checkout]


class FakeMegatronPolicy:
    def train_step(self, batch: Any, loss: Any, schedules: bool) -> dict[str, float]:
        return {"loss": 1.0, "grad_norm": 1.0, "token_mult_prob_error": 1.0}

    def step_schedule(self) -> None: ...


@pytest.fixture
def policy(monkeypatch) -> Any:
    from nemo_fp8rl.nemo_rl.compat import prepare

    prepare()
    from nemo_fp8rl.nemo_rl.adapters import megatron_policy as module

    monkeypatch.setattr(module, "_as_loss", lambda loss_fn, absent: loss_fn)
    gates = [GateConfig("token_mult_prob_error", 1.001, "skip_step")]
    cfg: Any = SimpleNamespace(
        policy=SimpleNamespace(
            train_micro_batch_size=2,
            train_global_batch_size=3,
            megatron_cfg=SimpleNamespace(offload_between_phases=False, optimizer=SimpleNamespace(weight_decay=0.0)),
        ),
        fp8_kv_cache=False,
        trainer_kv_window=None,
        data_parallel_size=1,
        loss_fn=SimpleNamespace(force_on_policy_ratio=False),
        nemo_fp8rl=SimpleNamespace(gates=gates, mismatch_alarm="warn"),
    )
    made = module.MegatronFp8Policy(FakeMegatronPolicy(), cfg, None, is_resumed=False)  # type: ignore[arg-type]
    made._explained = lambda asynchronous: 1.05
    return made


@pytest.mark.parametrize("failure", [RefitError("no room in /dev/shm"), WorkerDied("no room in /dev/shm")])
def test_a_refit_that_fails_is_a_sentence(failure):
    from nemo_fp8rl.nemo_rl.compat import prepare

    prepare()
    from nemo_fp8rl.nemo_rl.adapters.weight_sync import Fp8WeightSynchronizer

    def refit() -> None:
        raise failure

    does_nothing = SimpleNamespace(offload_before_refit=lambda: None, prepare_for_generation=lambda: None)
    synchronizer = Fp8WeightSynchronizer(does_nothing, does_nothing, SimpleNamespace(refit=refit))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^no room in /dev/shm; mend that, then start the run again"):
        synchronizer.sync_weights()
    assert synchronizer.is_stale


def batch(sample_mask: list[float]) -> dict[str, Any]:
    """Three answers: of the first trainer and engine disagree, the last has no token."""
    token_mask = torch.tensor([[0, 1, 1.0], [0, 1, 1], [0, 0, 0]])
    logprobs = torch.full((3, 3), -1.0)
    generation_logprobs = logprobs.clone()
    generation_logprobs[0] = -3
    return {
        "input_ids": torch.ones(3, 3, dtype=torch.long),
        "input_lengths": torch.tensor([3, 3, 3]),
        "token_mask": token_mask,
        "sample_mask": torch.tensor(sample_mask),
        "advantages": torch.ones(3, 3),
        "prev_logprobs": logprobs,
        "generation_logprobs": generation_logprobs,
        "reference_policy_logprobs": logprobs,
    }


def test_a_gate_judges_samples_that_are_trained_on_alone(policy):
    assert policy.train(batch([1, 1, 1]), None)["all_mb_metrics"]["optimizer_steps_skipped"] == [1]
    metrics = policy.train(batch([0, 1, 1]), None)["all_mb_metrics"]
    assert metrics["optimizer_steps_skipped"] == [0]
    assert metrics["token_mult_prob_error"] == [1]


def test_a_mismatch_that_nothing_explains_is_said_where_nobody_misses_it(policy, capsys):
    policy.train(batch([1, 1, 1]), None)
    assert all("nemo-fp8rl: MISMATCH: token_mult_prob_error is 4.195" in text for text in capsys.readouterr())
    policy.train(batch([0, 1, 1]), None)
    assert not any("MISMATCH" in text for text in capsys.readouterr())
    policy.cfg.nemo_fp8rl.mismatch_alarm = "stop"
    with pytest.raises(UserError, match="MISMATCH"):
        policy.train(batch([1, 1, 1]), None)


def test_the_mismatch_is_of_all_tokens_whatever_the_loss_makes_of_it(policy):
    """With `bypass` the loss finds none, with `denominator: kept` that of the tokens that are left."""
    policy.cfg.nemo_fp8rl.gates = []
    metrics = policy.train(batch([1, 1, 1]), None)["all_mb_metrics"]
    assert metrics["optimizer_steps_skipped"] == [0]
    assert metrics["token_mult_prob_error"] == [pytest.approx((2 * math.exp(2) + 2) / 4)]
    policy.cfg.loss_fn.force_on_policy_ratio = True  # there are no log-probs of the trainer's but the loss's
    metrics = policy.train(batch([1, 1, 1]), None)["all_mb_metrics"]
    assert metrics["token_mult_prob_error"] == [1]


def test_valid_samples_are_those_of_the_mask_as_nemo_rl_counts(policy):
    metrics = policy.train(batch([0, 1, 1]), None)["all_mb_metrics"]
    assert (metrics["global_valid_seqs"], metrics["global_valid_toks"]) == ([2], [2])


def test_samples_without_an_answer_are_counted_and_a_batch_of_them_alone_is_refused(policy):
    """As NeMo RL's asynchronous rollouts leave them where generation failed; what is filtered from the loss had one."""
    given = batch([0, 1, 1])
    assert policy.train(given, None)["all_mb_metrics"]["samples_without_answer"] == [1]
    assert policy.train(batch([0, 0, 1]), None)["all_mb_metrics"]["optimizer_steps_skipped"] == [1]
    with pytest.raises(UserError, match=r"^no sample of this batch has an answer: NeMo RL printed above why"):
        policy.train(given | {"token_mask": torch.zeros(3, 3)}, None)


def test_three_steps_whose_advantages_are_all_0_are_said_once(policy, capsys):
    equal = batch([0.0, 1.0, 1.0]) | {"advantages": torch.zeros(3, 3)}
    differing = batch([0.0, 1.0, 1.0])
    for data, count in [(equal, 2), (differing, 1), (equal, 5)]:
        for _ in range(count):
            policy.train(dict(data), None)
    said = [line for line in capsys.readouterr().out.splitlines() if "advantages were 0" in line]
    assert said == [line for line in said if line.startswith("nemo-fp8rl: in the last 3 steps")]
    assert len(said) == 1
