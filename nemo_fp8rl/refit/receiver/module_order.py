"""The order in which an engine rank reads its links where a module comes from several trainer ranks.

vLLM's loaders keep the tensors of a module until the last one arrives, so the tensors of a trainer rank that is ahead
stay in memory until the others arrive. A link is therefore not read while an incomplete module lacks only parts of
other links. Its next messages stay in its two buckets, and in the end the trainer rank waits.

No link stays stalled for ever, if trainer ranks send the modules that they share in one order, module by module, and if
a rank that waits has sent all that it has (`WeightSender`). Consider the stalled link with the smallest module index m.
The sink that stalls it lacks a part of a module before m, because the data in the link's buckets come after that
module. The rank with the missing part is at m or later, so it has sent the part. If that rank's link is stalled as
well, then it is stalled for a module before this one.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from nemo_fp8rl.refit.manifest import TensorPart


class ModuleOrder:
    """Decides which links may be read.

    routes:  the route of each link
    modules: the module of each tensor that a loader keeps until its module is complete, by the tensor's name
    """

    def __init__(self, routes: Sequence[Sequence[TensorPart]], modules: Mapping[str, Hashable]) -> None:
        self.modules = modules
        self.missing = [Counter(modules[part.name] for part in route if part.name in modules) for route in routes]
        """For each link, the number of pieces that are still to arrive, by module."""
        self.incomplete: list[set[Hashable]] = [set() for _ in routes]
        """For each link, the modules of which all its pieces have arrived, but not yet those of other links."""

    def record(self, link: int, part: TensorPart) -> None:
        """Note that a piece arrived on a link."""
        if part.name not in self.modules:
            return
        module = self.modules[part.name]
        self.missing[link][module] -= 1
        if not self.missing[link][module]:
            del self.missing[link][module]
            self.incomplete[link].add(module)
            if not any(module in missing for missing in self.missing):
                for incomplete in self.incomplete:
                    incomplete.discard(module)

    def may_read(self, link: int) -> bool:
        return not self.incomplete[link]
