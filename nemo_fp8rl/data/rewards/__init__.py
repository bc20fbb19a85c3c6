"""Verifiers by name: functions from a completion's text to a reward."""

from nemo_fp8rl.data.rewards.math_process import MAX_PROCESSES
from nemo_fp8rl.data.rewards.verifiers import VERIFIERS, Verifier, check_verifier

__all__ = ["MAX_PROCESSES", "VERIFIERS", "Verifier", "check_verifier"]
