"""Rewards by name: verifiers of this package, and functions of the user's own."""

from nemo_fp8rl.data.rewards.scoring import Answered, Scorer, load_scorer
from nemo_fp8rl.data.rewards.verifiers import VERIFIERS, Verifier, check_verifier

__all__ = ["VERIFIERS", "Answered", "Scorer", "Verifier", "check_verifier", "load_scorer"]
