"""One flag that ends a run at its next step border, with a checkpoint.

Setters: signals (`run.signals`), a pod that is about to end (`run.pod_stop`). Readers: our loop, `sft`, `compare`, and
the adapter of NeMo RL's loops (`nemo_rl.run.loop_stop`), which must be called because those loops read no flag of ours.
The deadline of a job under NeMo RL is a key of NeMo RL's own (`nemo_rl.run.run_loop.limit_time`).
"""

from collections.abc import Callable


class StopFlag:
    """A flag that is set once and stays set.

    It has no lock: a signal handler runs in the thread that it interrupts and could not wait for one.
    """

    def __init__(self, on_set: Callable[[], None] = lambda: None) -> None:
        """on_set: called at the first `set`, in the thread of the setter."""
        self._is_set = False
        self._on_set = on_set

    @property
    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        if not self._is_set:
            self._is_set = True
            self._on_set()
