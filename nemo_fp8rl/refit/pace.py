"""Which link an engine rank reads next where a module of it comes from several trainer ranks.

vLLM's loaders keep the tensors of a module until they have the last, so what a rank that is ahead brings has to wait
for the others, in memory. A link is held back while two modules wait that it has given all of its own to: what it
brings then waits in its two buckets, and in the end the trainer's rank waits.

None waits for ever: trainer ranks send the modules that they share in one order, and one that waits has sent all that
it has (`send`). Of those that wait the one that is least far is at some module m. It would be held back for two modules
up to m, the first of which lacks something of a rank that is at m or further, and so has sent it.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from nemo_fp8rl.refit.manifest import Route, TensorPart

WAITING = 2
"""Modules: with 1, two ranks within the same module could wait for each other by way of two engines."""


class Pace:
    """modules: of the names of tensors that a loader keeps until their module is complete."""

    def __init__(self, routes: Sequence[Route], modules: Mapping[str, Hashable]) -> None:
        self.modules = modules
        self.owed = [Counter(modules[part.name] for part in route if part.name in modules) for route in routes]
        self.waiting: list[set[Hashable]] = [set() for _ in routes]
        """Of each link, modules that it has given all of its own to and that lack something of others."""

    def arrived(self, link: int, part: TensorPart) -> None:
        if part.name not in self.modules:
            return
        module = self.modules[part.name]
        self.owed[link][module] -= 1
        if not self.owed[link][module]:
            del self.owed[link][module]
            self.waiting[link].add(module)
            if not any(module in owed for owed in self.owed):
                for waiting in self.waiting:
                    waiting.discard(module)

    def may_go_on(self, link: int) -> bool:
        return len(self.waiting[link]) < WAITING
