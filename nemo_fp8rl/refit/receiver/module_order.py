"""Which link an engine rank reads next where a module of it comes from several trainer ranks.

vLLM's loaders keep the tensors of a module until they have the last, so what a rank that is ahead brings has to wait
for the others, in memory. A link is held back while a module waits that it has given all of its own to: what it brings
next then waits in its two buckets, and in the end the trainer's rank waits.

None waits for ever, as long as trainer ranks send what they share module by module, in one order, and one that waits
has sent all that it has (`send`). Of those that wait take the one that is least far, at a module m. The sink that holds
it back lacks a part of a module before m, for what fills its buckets comes after that module. The rank that has the
part is at m or further, so it has sent it; and if its link is held back as well, then for a module before this one.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from nemo_fp8rl.refit.manifest import Route, TensorPart


class ModuleOrder:
    """modules: of the names of tensors that a loader keeps until their module is complete."""

    def __init__(self, routes: Sequence[Route], modules: Mapping[str, Hashable]) -> None:
        self.modules = modules
        self.owed = [Counter(modules[part.name] for part in route if part.name in modules) for route in routes]
        self.waiting: list[set[Hashable]] = [set() for _ in routes]
        """For each link, modules that it has given all of its own to and that lack something of others."""

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

    def may_read(self, link: int) -> bool:
        return not self.waiting[link]
