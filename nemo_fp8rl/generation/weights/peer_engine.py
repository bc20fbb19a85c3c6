"""An engine as a source of weights for other engines: the calls of its ranks."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from nemo_fp8rl.generation.core import Core
from nemo_fp8rl.refit.interface import Addresses, Transport
from nemo_fp8rl.refit.manifest import RefitError, to_json
from nemo_fp8rl.refit.reports import SendReport
from nemo_fp8rl.refit.route_plan import Links


class PeerEngine:
    """A mixin of `VllmEngine`, which has the attributes. host: this node's address."""

    core: Core
    host: str
    loaded_version: int
    sleep_level: int
    _errors_as_death: Callable[[], AbstractContextManager[None]]

    def offer(self, engine: int, links: Links, transport: Transport, token: str, timeout: float) -> Addresses:
        """Get ready for links from this engine's ranks to those of another engine; return their addresses."""
        routes = [[to_json(route) for route in of_source] for of_source in links.routes]
        with self._errors_as_death():
            how = transport, self.host, token, timeout
            answers = self.core.rpc("nemo_fp8rl_offer", engine, routes, links.capacities, *how)
        raise_first(refusal for _, refusal in answers)
        return [addresses for addresses, _ in answers]

    def withdraw(self, engine: int) -> None:
        """Close the links to another engine."""
        self.core.rpc("nemo_fp8rl_withdraw", engine)

    def start_push(self, version: int, engines: Sequence[int], how: dict[str, bool]) -> None:
        """Begin to send the version in memory to other engines; this engine may generate meanwhile.

        how:    the keywords of `PeerSource.start_push`

        Raises: RefitError where it has another version, or a tensor in a form that cannot be passed on
        """
        if self.loaded_version != version or self.sleep_level:
            raise RefitError(f"this engine sleeps or has version {self.loaded_version}, so it cannot give {version}")
        with self._errors_as_death():
            raise_first(self.core.rpc("nemo_fp8rl_start_push", version, list(engines), how))

    def finish_push(self) -> list[SendReport]:
        """Wait until everything is sent, and return one report per rank."""
        with self._errors_as_death():
            answers = self.core.rpc("nemo_fp8rl_finish_push")
        raise_first(refusal for *_, refusal in answers)
        return [
            SendReport(**fields, failed={(engine, rank): why for engine, rank, why in failed})
            for fields, failed, _ in answers
        ]


def raise_first(refusals: Iterable[str]) -> None:
    """Raise a RefitError of the first text that is not empty, if there is one."""
    if refusal := next(filter(None, refusals), ""):
        raise RefitError(refusal)
