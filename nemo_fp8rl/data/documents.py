"""Documents for continual pre-training: their tokens one after the other, cut into sequences of equal length."""

from collections.abc import Sequence

import torch

from nemo_fp8rl.data.examples import Example
from nemo_fp8rl.data.records import Record
from nemo_fp8rl.data.tokenizer import PromptTokenizer


def cut_documents(records: Sequence[Record], tokenizer: PromptTokenizer, length: int) -> list[Example]:
    """Return sequences of `length` tokens, the last one with what is left, and the loss on all tokens.

    A document has the tokenizer's own special tokens and ends with its end-of-sequence token. A sequence begins with
    the last token of the one before it, so that each token but the very first is predicted once. Attention goes over
    the borders of documents within a sequence, as in Megatron's pre-training by default.
    """
    parts = []
    for record in records:
        ids = tokenizer.tokenizer(record.prompt).input_ids
        end = [] if ids and ids[-1] == tokenizer.eos_token_id else [tokenizer.eos_token_id]
        parts.append(torch.tensor([*ids, *end], dtype=torch.int32))
    tokens = torch.cat(parts)
    starts = range(0, len(tokens) - 1, length - 1)
    pieces = [tokens[start : start + length] for start in starts]
    return [Example(piece, torch.ones(len(piece), dtype=torch.bool)) for piece in pieces]
