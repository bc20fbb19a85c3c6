"""Prompts: read from JSONL, split into training and validation, in a reproducible order; and the verifiers of answers.

It imports nothing: a verifier's child process would otherwise load torch.
"""
