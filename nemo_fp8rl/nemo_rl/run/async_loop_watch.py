"""Whether NeMo RL's asynchronous loop ended since it was done.

It prints an error of its first refit, on v0.7.0 of any step, and returns as it does after the last one.
"""

from collections.abc import Callable
from typing import Any

CALLS = (
    *("train", "get_logprobs", "get_reference_policy_logprobs", "save_checkpoint"),
    *("stream_weights_via_ipc_zmq", "broadcast_weights_for_collective"),  # how v0.7.0 refits
)
"""A policy's calls that are watched; the loop goes on after no error of theirs."""


class Watch:
    """Watches a policy and, where the engine has one, its weight synchronizer: these objects alone, not their classes.

    steps: that the policy trained. error: the first that a call raised.
    """

    def __init__(self, policy: Any, synchronizer: Any) -> None:
        self.steps = 0
        self.error: Exception | None = None
        for name in CALLS:
            setattr(policy, name, self._watched(getattr(policy, name), is_step=name == "train"))
        if synchronizer is not None:
            synchronizer.sync_weights = self._watched(synchronizer.sync_weights)

    def check(self, asked: int) -> None:
        """Call after the loop, where nothing else ended it. Raises what it passed over, or RuntimeError if that is
        unknown.

        asked: how many steps it had to take.
        """
        if self.error is not None:
            raise self.error
        if self.steps < asked:
            raise RuntimeError(
                f"NeMo RL's asynchronous loop ended after {self.steps} of {asked} steps: the error that it passed over "
                "is printed above"
            )

    def _watched(self, call: Callable[..., Any], is_step: bool = False) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                result = call(*args, **kwargs)
            except Exception as error:
                self.error = self.error or error
                raise
            self.steps += is_step
            return result

        return watched
