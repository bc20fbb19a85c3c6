"""Prompts: read from JSONL, split into training and validation, in a reproducible order."""

from nemo_fp8rl.data.jsonl import Record, read_jsonl
from nemo_fp8rl.data.order import PromptOrder
from nemo_fp8rl.data.split import split_records

__all__ = ["PromptOrder", "Record", "read_jsonl", "split_records"]
