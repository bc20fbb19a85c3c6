"""Examples of supervised training: tokens, and on which of them the loss is."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_fp8rl.batch import RolloutBatch


@dataclass(frozen=True, eq=False)
class Example:
    """One sequence.

    token_ids:  int32 [tokens]
    loss_mask:  bool [tokens], True for tokens whose negative log-likelihood is the loss; a first token never counts
    """

    token_ids: Tensor
    loss_mask: Tensor

    @classmethod
    def of_parts(cls, *parts: tuple[Sequence[int], bool]) -> "Example":
        """Make one of (tokens, whether the loss is on them) pairs."""
        ids = [token for tokens, _ in parts for token in tokens]
        mask = [has_loss for tokens, has_loss in parts for _ in tokens]
        return cls(torch.tensor(ids, dtype=torch.int32), torch.tensor(mask, dtype=torch.bool))

    @property
    def has_loss(self) -> bool:
        return bool(self.loss_mask[1:].any())


def collate_examples(examples: Sequence[Example], pad_token_id: int) -> RolloutBatch:
    """Return the batch whose row i is examples[i]; every sample_mask is 1."""
    b, t = len(examples), max(len(example.token_ids) for example in examples)
    input_ids, token_mask = torch.full((b, t), pad_token_id, dtype=torch.int64), torch.zeros(b, t)
    for i, example in enumerate(examples):
        input_ids[i, : len(example.token_ids)] = example.token_ids
        token_mask[i, : len(example.token_ids)] = example.loss_mask.float()
    return RolloutBatch(
        input_ids=input_ids,
        input_lengths=torch.tensor([len(example.token_ids) for example in examples]),
        token_mask=token_mask,
        sample_mask=torch.ones(b),
        generation_logprobs=torch.zeros(b, t),
    )


def digest_examples(examples: Sequence[Example]) -> str:
    """Return 16 hex digits of tokens and masks, in order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(len(example.token_ids).to_bytes(8, "little"))
        digest.update(example.token_ids.numpy().tobytes() + example.loss_mask.numpy().tobytes())
    return digest.hexdigest()[:16]
