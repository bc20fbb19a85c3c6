"""A reward function of the user: `data.default.env_name: package.module:function`.

    def reward(completion, answer): ...              once for each sample; returns a number
    def rewards(completions, answer, **fields): ...  once for a batch, as TRL's; lists of equal length, returns a list

A function gets what its parameters name: completion, answer, prompt, rendered_prompt, and any field of the data's
lines. One that names `completions` is the batch form; its parameters are lists (`prompts` and `answers` as well).
"""

import importlib
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from nemo_fp8rl.common.errors import StepRefused, UserError

KEY = "data.default.env_name"
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
PLURALS = {"completions": "completion", "prompts": "prompt", "answers": "answer"}
"""Parameter of the batch form -> the field whose values it is a list of."""
SHOWN = 60
Row = tuple[Mapping[str, Any], str]
"""The fields of a sample with its completion, and its place."""


def is_function_name(name: str) -> bool:
    """Return whether the name is a function's, well formed or not: a verifier's name has neither dot nor colon."""
    return ":" in name or "." in name or "/" in name


class RewardFunction:
    """An imported function, called by the names of its parameters.

    takes_batch: True for the batch form
    """

    def __init__(self, name: str) -> None:
        """Raises: UserError if there is no such function, or if it cannot be called by names"""
        if not NAME.fullmatch(name):
            raise UserError(
                f"{KEY}={name!r} names no function; write the module's dotted name, a colon and the function's, such "
                "as my_rewards:score"
            )
        module_name, _, attribute = name.partition(":")
        module = _import(module_name, name)
        self.name = name
        self.function = _find(module, attribute, name)
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):
            raise UserError(f"{KEY}={name}: its parameters cannot be read; wrap it in a function of your own") from None
        if inspect.iscoroutinefunction(self.function):
            raise UserError(f"{KEY}={name} is a coroutine; write a plain function, which may call asyncio.run itself")
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]
        if positional:
            raise UserError(
                f"{KEY}={name}: its parameter {positional[0]} has no name to call it by; remove / and *args"
            )
        self.takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind != p.VAR_KEYWORD]
        self.parameters = {p.name: p.default is p.empty for p in named}
        self.takes_batch = "completions" in self.parameters
        if not self.takes_batch and "completion" not in self.parameters:
            raise UserError(
                f"{KEY}={name} has no parameter `completion`, nor `completions` for a batch; name the one it scores"
            )

    def check_fields(self, samples: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Raise UserError for a parameter without default that is no field of a sample, given as (place, fields)."""
        for name in sorted(self.required_fields() - {"completion", "prompt", "rendered_prompt"}):
            for place, fields in samples:
                if fields.get(name) is None:
                    known = ", ".join(dict.fromkeys(["completion", "prompt", "rendered_prompt", *fields]))
                    raise UserError(
                        f"{KEY}={self.name} has the parameter {name}, and {place or 'a sample'} has no {name}; it may "
                        f"name {known}, or give the parameter a default"
                    )

    def required_fields(self) -> set[str]:
        """Return the fields of a sample that the parameters without default name."""
        return {self._field(name) for name, is_required in self.parameters.items() if is_required}

    def call_for_each(self, rows: Sequence[Row]) -> list[float]:
        """Return the reward of each sample. Raises StepRefused, with the sample, where there is none."""
        return [self._check(self._call(self._arguments(row[0]), f"for {_describe(*row)}"), row) for row in rows]

    def call_for_batch(self, rows: Sequence[Row]) -> list[float]:
        """Return the reward of each sample. Raises StepRefused, with the sample, where there is none."""
        if not rows:
            return []
        columns = {
            name: [fields.get(name) for fields, _ in rows] for name in dict.fromkeys(n for f, _ in rows for n in f)
        }
        columns |= {plural: columns[field] for plural, field in PLURALS.items() if field in columns}
        where = f"for {len(rows)} samples, the first of which is {_describe(*rows[0])}"
        result = self._call(self._arguments(columns), where)
        try:
            values = None if isinstance(result, str | bytes | Mapping) else list(result)
        except TypeError:
            values = None
        if values is None or len(values) != len(rows):
            what = f"a {type(result).__name__}" if values is None else f"{len(values)} rewards"
            raise StepRefused(f"{KEY}={self.name} returned {what} {where}; return a list of {len(rows)} numbers")
        return [self._check(value, row) for value, row in zip(values, rows, strict=True)]

    def _check(self, result: Any, row: Row) -> float:
        reward = to_reward(result)
        if reward is None:
            raise StepRefused(
                f"{KEY}={self.name} returned {_shorten(result)} for {_describe(*row)}; return a finite number"
            )
        return reward

    def _field(self, parameter: str) -> str:
        return PLURALS.get(parameter, parameter) if self.takes_batch else parameter

    def _arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that the function's parameters name; a missing one has its default."""
        required = {name: values.get(name) for name, is_required in self.parameters.items() if is_required}
        present = {name: value for name, value in values.items() if value is not None and name in self.parameters}
        if not self.takes_all:
            return required | present
        singular = {"completion"} if self.takes_batch else set()
        return {name: value for name, value in values.items() if name not in singular} | required | present

    def _call(self, arguments: Mapping[str, Any], where: str) -> Any:
        try:
            return self.function(**arguments)
        except (Exception, SystemExit) as error:
            frames = traceback.extract_tb(error.__traceback__)[1:]
            module = getattr(sys.modules.get(self.name.partition(":")[0]), "__file__", None)
            frame = next(
                (frame for frame in reversed(frames) if frame.filename == module), frames[-1] if frames else None
            )
            line = f" ({os.path.basename(frame.filename)}, line {frame.lineno})" if frame else ""
            text = _message(error)
            raise StepRefused(
                f"{KEY}={self.name} raised {type(error).__name__}{f': {text}' if text else ''}{line} {where}; mend the "
                "function"
            ) from None


def to_reward(value: Any) -> float | None:
    """Return a number, true or false, or a tensor of one element, as a float; None for anything else and for NaN."""
    if isinstance(value, str | bytes) or value is None:
        return None
    if not isinstance(value, int | float) and hasattr(value, "item"):
        try:
            value = value.item()  # of numpy and torch
        except (ValueError, RuntimeError, TypeError):
            return None
    try:
        number = float(value) if isinstance(value, int | float) or hasattr(value, "__float__") else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and abs(number) < 2.0**127 else None  # rewards are float32


def _import(module_name: str, name: str) -> ModuleType:
    """Import the module, also from the working directory, as a script would. Raises UserError."""
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            fix = "run in the folder of the module, or set PYTHONPATH"
            if module_name.endswith(".py"):
                fix = "leave out .py"
            raise UserError(
                f"{KEY}={name}: there is no module {error.name} in {folder}, nor where Python looks; {fix}"
            ) from None
        raise UserError(f"{KEY}={name}: importing {module_name} fails, it needs {error.name}; install it") from None
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{KEY}={name}: importing {module_name} raises {type(error).__name__}: {_message(error)}; mend the module"
        ) from None


def _message(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _find(module: ModuleType, attribute: str, name: str) -> Callable[..., Any]:
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        listed = f"; it has {', '.join(functions[:8])}" if functions else ""
        raise UserError(f"{KEY}={name}: {module.__file__ or module.__name__} has no function {attribute}{listed}")
    return found


def _describe(fields: Mapping[str, Any], place: str) -> str:
    """Return the name of a sample: its line, the beginning of its prompt and its completion."""
    prompt = fields.get("prompt", fields.get("rendered_prompt", ""))
    if isinstance(prompt, list) and prompt:
        prompt = prompt[-1].get("content") or ""
    named = place or "the sample"
    return f"{named} (prompt {_shorten(prompt)}, completion {_shorten(fields.get('completion', ''))})"


def _shorten(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # a class of the user
        text = f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
