"""docs/metrics.md says what every metric of training means, and names none that there is not."""

import re
from pathlib import Path

from nemo_fp8rl.algorithms.mismatch import MismatchSums
from tests.algorithms.losses import make_loss
from tests.algorithms.reference import make_batch
from tests.batches import correct_columns, loss_of_columns

PAGE = Path(__file__).parent.parent.parent / "docs" / "metrics.md"


def described() -> set[str]:
    """The names in the first cells of the tables of its section on training; positions without their numbers."""
    section = PAGE.read_text().partition("\n## Training\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")]
    return {without_numbers(name) for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def without_numbers(name: str) -> str:
    return re.sub(r"(?<=/position_)\w+", "N", name)


def test_every_metric_of_training_is_described_and_no_other():
    curr, batch = make_batch(0)
    seen = MismatchSums()
    seen.observe(batch["prev_logprobs"], batch["generation_logprobs"], batch["token_mask"])
    loss = make_loss({"reference_policy_kl_penalty": 0.0, "off_policy_mask_threshold": 0.5}, {"preset": "tis"})
    batch, corrected = correct_columns(batch, loss.correction)
    _, trained = loss_of_columns(loss, curr, batch, batch["sample_mask"].sum(), batch["token_mask"].sum())
    emitted = {*seen.metrics(), *seen.by_position(), *corrected, *trained}
    assert described() == {without_numbers(name) for name in emitted}
