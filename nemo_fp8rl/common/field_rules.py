"""Rules that stand beside a field of a configuration block, as `Annotated[int, Range(above=0), MAY_CHANGE]`.

A block is a frozen dataclass. The readers of a block (types, ranges, resume, NeMo RL's recipes, docs/config.md) find
all about a key at its field, so that a new key is one edit. The module needs neither torch nor pydantic, because a
recipe is read without both.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from nemo_fp8rl.common.errors import UserError


class Block:
    """Base of the blocks of a recipe: a key that a block does not list is an error.

    removed_keys: name of a key of earlier versions -> the reason why it was removed
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    removed_keys: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def preset_values(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return defaults that depend on `values`, the keys that the recipe gives; for blocks with presets."""
        return {}


@dataclasses.dataclass(frozen=True)
class Range:
    """Bounds of a number; NaN fails them, and so does infinity without `or_infinite`.

    or_value:  a value outside the bounds that is allowed as well
    hint:      what the message adds: a common value, or the reason of the bounds
    """

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    or_value: float | None = None
    or_infinite: bool = False
    hint: str = ""

    def violation(self, value: Any) -> str:
        """Return how a message goes on after `key=value`; empty if the value lies in the range."""
        lower = -math.inf if self.above is None else self.above
        if self.or_value is not None and value == self.or_value:
            return ""
        is_inside = (
            lower < value
            and (value < math.inf or self.or_infinite)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )
        return "" if is_inside else f" must {self._bounds()}{f': {self.hint}' if self.hint else ''}"

    def _bounds(self) -> str:
        if self.at_least is not None and self.at_most is not None:
            other = "" if self.or_value is None else f", or be {self.or_value}"
            return f"lie in {self.at_least}..{self.at_most}{other}"
        bounds = [f"above {self.above}"] if self.above is not None else []
        bounds += [f"of {self.at_least} or more"] if self.at_least is not None else []
        bounds += [f"below {self.below}"] if self.below is not None else []
        bounds += [f"at most {self.at_most}"] if self.at_most is not None else []
        return " ".join(["be a number" if self.or_infinite else "be a finite number", " and ".join(bounds)]).strip()

    def __str__(self) -> str:
        """The range in the notation of docs/config.md."""
        if self.at_least is not None and self.at_most is not None:
            text = f"{self.at_least}..{self.at_most}"
        else:
            signs = ((">", self.above), (">=", self.at_least), ("<", self.below), ("<=", self.at_most))
            text = ", ".join(f"{sign} {bound:.10g}" for sign, bound in signs if bound is not None)
        return text if self.or_value is None else f"{text} or {self.or_value}"


@dataclasses.dataclass(frozen=True)
class NotBlank:
    """A text, or each text of a list, must not be empty.

    hint:       what the message says after `key=value`
    or_spaces:  a text of spaces is allowed
    """

    hint: str
    or_spaces: bool = False

    def violation(self, value: Any) -> str:
        texts = (value,) if isinstance(value, str) else value
        return "" if all(text if self.or_spaces else text.strip() for text in texts) else f": {self.hint}"

    def __str__(self) -> str:
        return "not blank"


@dataclasses.dataclass(frozen=True)
class MayChange:
    """A resumed run may give the key another value; `reason` says why where it is not plain."""

    reason: str = ""


@dataclasses.dataclass(frozen=True)
class EarlierRuns:
    """The key was added after runs had been recorded. value: how those runs behaved."""

    value: Any


@dataclasses.dataclass(frozen=True)
class NemoRl:
    """NeMo RL's spelling of the key.

    spelling:      its keys where they differ; empty: the same key with the same meaning
    for_our_loop:  only `nemo-fp8rl train` reads it from a recipe for NeMo RL; else NeMo RL's own loop does
    """

    spelling: str = ""
    for_our_loop: bool = False


@dataclasses.dataclass(frozen=True)
class NullAs:
    """Another spelling of null, which other libraries have; it becomes null when a recipe is read."""

    value: Any


@dataclasses.dataclass(frozen=True)
class FilePath:
    """The value may be a path: a leading ~/ is the home folder."""


MAY_CHANGE, NEMO_RL, NEMO_RL_LOOP, FILE_PATH = MayChange(), NemoRl(), NemoRl(for_our_loop=True), FilePath()
ABOVE_0, AT_LEAST_0 = Range(above=0), Range(at_least=0)


def reference(text: str) -> Any:
    """Return the default of a field that follows other keys of the recipe, such as "${policy.model_name}"."""
    return text


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a block.

    key:      dotted, from the root
    hint:     its type without markers
    markers:  the markers of `Annotated`
    block:    the dataclass behind the type, also behind `Block | None`; None for a value
    element:  the dataclass of the entries of `tuple[Block, ...]`; None for anything else
    """

    key: str
    name: str
    hint: Any
    markers: tuple[Any, ...]
    default: Any
    block: Any
    element: Any

    def marker(self, kind: type) -> Any:
        """Return the marker of this class, or None."""
        return next((marker for marker in self.markers if isinstance(marker, kind)), None)

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a Literal, with None where the key may be null; empty for another type."""
        kinds = (self.hint, *get_args(self.hint))
        options = [option for kind in kinds if get_origin(kind) is Literal for option in get_args(kind)]
        return (*options, *([None] if options and type(None) in get_args(self.hint) else []))


@cache
def fields_of(block: Any, prefix: str = "") -> tuple[Field, ...]:
    """Return the fields of one block; `prefix` stands before their keys."""
    hints = get_type_hints(block, include_extras=True)
    return tuple(_field(f, hints[f.name], prefix) for f in dataclasses.fields(block))


def all_fields(block: Any, prefix: str = "") -> Iterator[Field]:
    """Yield the fields of a block and of all blocks in it; the field of a block comes before its own."""
    for field in fields_of(block, prefix):
        yield field
        if field.block:
            yield from all_fields(field.block, f"{field.key}.")


def check_fields(values: Any, prefix: str) -> None:
    """Raise UserError, naming the key, for a value of a block that is out of range or none of the choices.

    values: an instance of the block; its own values are checked before the blocks in it, whose defaults may follow
    """
    block: Any = type(values)
    pairs = ((field, getattr(values, field.name)) for field in fields_of(block, prefix))
    present = [(field, value) for field, value in pairs if value is not None]
    for field, value in present:
        if field.choices and value not in field.choices:
            raise UserError(f"{field.key}={_on_one_line(value)} is none of {', '.join(map(str, field.choices))}")
        for marker in field.markers:
            if isinstance(marker, Range | NotBlank) and (violation := marker.violation(value)):
                raise UserError(f"{field.key}={_on_one_line(value)}{violation}")
    for field, value in present:
        if field.block:
            check_fields(value, f"{field.key}.")
        for i, entry in enumerate(value if field.element else ()):
            check_fields(entry, f"{field.key}[{i}].")


def _on_one_line(value: Any) -> str:
    """Return the value for a message. Python refuses to write an integer of more than 4300 digits."""
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number of more than 60 digits"
    return repr(value)[:100]


def _field(f: "dataclasses.Field[Any]", hint: Any, prefix: str) -> Field:
    markers: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        markers, hint = hint.__metadata__, hint.__origin__
    blocks = [option for option in (hint, *get_args(hint)) if dataclasses.is_dataclass(option)]
    block = blocks[0] if blocks else None
    is_list = get_origin(hint) is tuple
    default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
    return Field(
        prefix + f.name, f.name, hint, markers, default, None if is_list else block, block if is_list else None
    )
