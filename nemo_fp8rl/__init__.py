"""GRPO with FP8 end to end: a Megatron Core FP8 policy, a vLLM FP8 engine, and the same bytes in both."""

__version__ = "0.1.0"
