"""Verifiers, by name: what turns a completion's text into a reward."""

from nemo_fp8rl.data.rewards.math_process import AT_ONCE
from nemo_fp8rl.data.rewards.verifiers import VERIFIERS, Verifier, check_verifier

__all__ = ["AT_ONCE", "VERIFIERS", "Verifier", "check_verifier"]
