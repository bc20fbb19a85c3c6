"""Detects an error that NeMo RL's asynchronous loop ended on.

The loop prints an error of its first refit (on v0.7.0 of any step) and returns as it does after its last step.
"""

from collections.abc import Callable
from typing import Any

CALLS = (
    *("train", "get_logprobs", "get_reference_policy_logprobs", "save_checkpoint"),
    *("stream_weights_via_ipc_zmq", "broadcast_weights_for_collective"),  # how v0.7.0 refits
)
"""The watched calls of a policy. The loop does not continue after an error of one of them."""


class Watch:
    """Watches a policy and the engine's weight synchronizer, if there is one: the objects and not their classes.

    steps:  number of steps that the policy trained
    error:  the first error that a call raised
    """

    def __init__(self, policy: Any, synchronizer: Any) -> None:
        self.steps = 0
        self.error: Exception | None = None
        for name in CALLS:
            setattr(policy, name, self._watch(getattr(policy, name), is_step=name == "train"))
        if synchronizer is not None:
            synchronizer.sync_weights = self._watch(synchronizer.sync_weights)

    def check(self, expected_steps: int) -> None:
        """Raise the error that the loop ended on, or RuntimeError if the error is unknown. Call it after the loop.

        expected_steps: number of steps that the loop had to take
        """
        if self.error is not None:
            raise self.error
        if self.steps < expected_steps:
            raise RuntimeError(
                f"NeMo RL's asynchronous loop ended after {self.steps} of {expected_steps} steps; its error is "
                "printed above"
            )

    def _watch(self, call: Callable[..., Any], is_step: bool = False) -> Callable[..., Any]:
        def call_and_record(*args: Any, **kwargs: Any) -> Any:
            try:
                result = call(*args, **kwargs)
            except Exception as error:
                self.error = self.error or error
                raise
            self.steps += is_step
            return result

        return call_and_record
