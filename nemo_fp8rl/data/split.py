"""Split records into training and validation records that share no prompt."""

import random
from collections.abc import Sequence

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.data.records import Record


def split_records(
    train: Sequence[Record], validation: Sequence[Record] | None, split_validation_size: float, seed: int
) -> tuple[list[Record], list[Record]]:
    """Return (train, validation); without a validation set, a random share of the distinct prompts becomes one.

    Records that repeat a prompt stay on one side.

        split_validation_size:  the share, between 0 and 1
        Raises:                 UserError when the two sets share a prompt or one of them is empty
    """
    if validation is not None:
        shared = {r.question for r in train} & {r.question for r in validation}
        if shared:
            raise UserError(
                f"data.validation.data_path: {len(shared)} prompts are also in data.train.data_path "
                f"(one is {min(shared)[0]!r}); remove them from one of the two"
            )
        return list(train), list(validation)
    if not 0 < split_validation_size < 1:
        raise UserError(f"data.train.split_validation_size={split_validation_size} must lie between 0 and 1")
    prompts = sorted({r.question for r in train})
    random.Random(seed).shuffle(prompts)
    held_out = set(prompts[: round(len(prompts) * split_validation_size)])
    if not held_out or len(held_out) == len(prompts):
        raise UserError(
            f"data.train.split_validation_size={split_validation_size} of {len(prompts)} distinct prompts leaves a "
            "side empty; give data.validation.data_path or another size"
        )
    return [r for r in train if r.question not in held_out], [r for r in train if r.question in held_out]
