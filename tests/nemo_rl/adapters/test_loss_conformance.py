"""NeMo RL's own loss tests, its ClippedPGLossFn replaced by ours."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.nemo_rl.runs import needs_checkout

pytestmark = [pytest.mark.nemo_rl, needs_checkout]
EXPECTED = {True: 32, False: 31}
"""Tests that `-k "clipped_pg or split_rescale"` selects: of main, and of v0.7.0."""


def run_their_tests(checkout: Path, loss: str) -> tuple[int, int, int]:
    """(passed, failed, calls of the loss)."""
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "conformance", "-p", "no:cacheprovider"]
    command += ["--noconftest", "-c", "/dev/null", "--rootdir", str(checkout), "-k", "clipped_pg or split_rescale"]
    command += [str(checkout / "tests/unit/algorithms/test_loss_functions.py")]
    here = Path(__file__).parent  # not the root: a `tests` of theirs is imported
    environment = {**os.environ, "LOSS_UNDER_TEST": loss}
    environment["PYTHONPATH"] = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    calls = re.search(r"calls of the loss under test: (\d+)", done.stdout)
    assert calls and "error" not in counts, done.stdout[-3000:] + done.stderr[-3000:]
    return counts.get("passed", 0), counts.get("failed", 0), int(calls[1])


def test_ours_passes_all_of_them(real_checkout):
    is_main = "split_rescale" in (real_checkout / "tests/unit/algorithms/test_loss_functions.py").read_text()
    passed, failed, calls = run_their_tests(real_checkout, "nemo_fp8rl.nemo_rl.adapters.loss_fn:GrpoLossFn")
    assert (passed, failed) == (EXPECTED[is_main], 0)
    assert calls >= passed


def test_a_broken_one_does_not(real_checkout):
    _, failed, calls = run_their_tests(real_checkout, "broken_loss:BrokenLossFn")
    assert failed >= 3
    assert calls


def test_nemo_rls_workers_give_ours_unfiltered_logprobs_for_the_kl(real_checkout, monkeypatch):
    """Sampling was restricted to the five likeliest tokens; the policy is its own reference."""
    from nemo_fp8rl.nemo_rl.compat import prepare

    prepare()
    from nemo_rl.algorithms.logits_sampling_utils import TrainingSamplingParams
    from nemo_rl.algorithms.loss.utils import prepare_loss_input
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    from nemo_fp8rl.nemo_rl.adapters.loss_fn import GrpoLossFn

    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)  # where NeMo RL takes the tokens
    torch.manual_seed(0)
    logits = torch.randn(2, 6, 32)
    chosen = logits[:, :-1].argmax(-1)
    data = BatchedDataDict(
        input_ids=torch.cat([torch.zeros(2, 1, dtype=torch.int64), chosen], 1),
        input_lengths=torch.tensor([6, 6]),
        token_mask=torch.ones(2, 6),
        sample_mask=torch.ones(2),
        advantages=torch.zeros(2, 6),
    )
    whole = logits[:, :-1].log_softmax(-1).gather(-1, chosen[..., None]).squeeze(-1)
    data["reference_policy_logprobs"] = torch.cat([torch.zeros(2, 1), whole], 1)
    loss = GrpoLossFn({"reference_policy_kl_penalty": 0.1})
    inputs, data = prepare_loss_input(logits, data, loss, sampling_params=TrainingSamplingParams(top_k=5))
    filtered = inputs["next_token_logprobs"]
    assert (filtered > whole + 0.1).all()
    data["prev_logprobs"] = data["generation_logprobs"] = torch.cat([torch.zeros(2, 1), filtered], 1)
    _, metrics = loss(filtered, data, torch.tensor(2.0), torch.tensor(10.0))
    assert metrics["kl_penalty"] == pytest.approx(0, abs=1e-6)
