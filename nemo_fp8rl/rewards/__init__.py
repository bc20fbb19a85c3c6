"""Verifiers, by name: what turns a completion's text into a reward."""

from nemo_fp8rl.rewards.verifiers import VERIFIERS, Verifier, check_verifier

__all__ = ["VERIFIERS", "Verifier", "check_verifier"]
