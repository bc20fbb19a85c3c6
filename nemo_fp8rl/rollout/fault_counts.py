"""Messages of the loop about engines that died."""

from collections.abc import Callable

from nemo_fp8rl.generation.interface import Generation


class FaultCounts:
    """Counts of engine restarts and of retried prompts, in whatever phase of the loop they happen."""

    def __init__(self, generation: Generation, say: Callable[[str], None]) -> None:
        self.generation, self.say = generation, say
        self.reported = self.in_last_row = generation.metrics()

    def report_new(self, when: str) -> None:
        """Log the counts that grew since the last call."""
        before, self.reported = self.reported, self.generation.metrics()
        for name, count in self.reported.items():
            if count > before[name]:
                self.say(f"{when}: {name} {count - before[name]:g}")

    def take_row(self) -> dict[str, float]:
        """Return by how much the reported counts grew since the last row."""
        before, self.in_last_row = self.in_last_row, self.reported
        return {name: count - before[name] for name, count in self.reported.items()}
