"""Streams of a device that finishes its work before a call returns."""

from typing import Any

import torch


class FakeEvent:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class FakeStream(torch.Stream):
    cuda_stream = 0

    def __new__(cls, *_: Any, **__: Any) -> "FakeStream":
        return super().__new__(cls, device="cuda")

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> "FakeStream":
        return self

    def __exit__(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        return event or FakeEvent()

    def query(self) -> bool:
        return True
