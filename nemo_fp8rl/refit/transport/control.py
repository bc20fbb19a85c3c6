"""The control connection of a link between processes: whole messages over TCP, every wait with an end.

Connection.send_bytes and recv_bytes frame the messages; its send and recv would unpickle what a stranger wrote.
"""

import json
import select
import socket
import struct
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from nemo_fp8rl.refit.transport.link import LinkError, timeout_text

MAX_GREETING = 64 << 10
"""Bytes of a greeting."""


class Control:
    """Takes the socket over. Everything raises LinkError where the other side is gone or silent.

    timeout: seconds a wait lasts, also one in the middle of a message. other: who is there, for messages.
    One thread may send while another receives; any thread may close.
    """

    def __init__(self, taken: socket.socket, timeout: float, other: str) -> None:
        self.timeout, self.other, self.closed = timeout, other, False
        self.local_host: str = taken.getsockname()[0]
        self.other_host: str = taken.getpeername()[0]
        taken.settimeout(None)
        taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))  # struct timeval
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._connection = Connection(taken.detach())
        self._arriving = select.poll()  # Connection.poll() would make one every time
        self._arriving.register(self._connection.fileno(), select.POLLIN)

    def send(self, message: bytes) -> None:
        with _Explained(self):
            self._connection.send_bytes(message)

    def receive(self, limit: int, forever: bool = False) -> bytes:
        """The next message, at most `limit` bytes. forever: it may begin at any time."""
        with _Explained(self):
            if not self._arriving.poll(None if forever else self.timeout * 1000):
                raise LinkError(f"{self.other} was silent for {timeout_text(self.timeout)}")
            return self._connection.recv_bytes(limit)

    def readable(self, within: float = 0.0) -> bool:
        """Whether within so many seconds a message begins, or the other side is gone: receive() says which."""
        with _Explained(self):
            return bool(self._arriving.poll(1000 * within))

    def authenticate(self, token: str, calling: bool) -> None:
        """Both sides prove that they know the run's token, the caller first."""
        steps = (deliver_challenge, answer_challenge)
        with _Explained(self):
            try:
                for step in reversed(steps) if calling else steps:
                    step(self._connection, token.encode())
            except AuthenticationError as error:
                raise LinkError(f"the run's token differs from that of {self.other} ({error})") from None
            except (AssertionError, ValueError):  # what Python 3.11 makes of bytes that are no challenge
                raise LinkError(f"{self.other} does not authenticate itself") from None

    def say(self, **greeting: str | int | list[int]) -> None:
        self.send(json.dumps(greeting).encode())

    def hear(self, **expected: type) -> dict[str, Any]:
        """A greeting with at least these fields, of these types. Raises LinkError with what the other side gives as
        its `error`."""
        message = self.receive(MAX_GREETING)
        try:
            greeting = json.loads(message)
        except (ValueError, RecursionError):
            greeting = None
        if isinstance(greeting, dict) and isinstance(greeting.get("error"), str):
            raise LinkError(f"{self.other}: {greeting['error']}")
        if not isinstance(greeting, dict) or any(type(greeting.get(key)) is not t for key, t in expected.items()):
            raise LinkError(f"{self.other} said {message[:80]!r}, which is no greeting with {sorted(expected)}")
        return greeting

    def refuse(self, error: Exception) -> None:
        """Close, and say why to whoever still listens."""
        with suppress(LinkError):
            self.say(error=str(error)[: MAX_GREETING // 16])  # JSON needs up to twelve bytes for a character
        self.close()

    def close(self) -> None:
        """Wake whoever waits on either side. The descriptor goes with the object: closed under a thread that waits,
        its number could become another file's."""
        self.closed = True
        opened = socket.socket(fileno=self._connection.fileno())
        with suppress(OSError):
            opened.shutdown(socket.SHUT_RDWR)
        opened.detach()


class _Explained:
    """Any failure of the connection as a LinkError.

    No `contextmanager`: with Python 3.12 the frames of one that raised refer to each other in a circle, and the end of
    the link, with a GPU's memory, would be kept until Python's collector comes by.
    """

    def __init__(self, control: Control) -> None:
        self.control = control

    def __enter__(self) -> None:
        if self.control.closed:
            raise LinkError(f"the link with {self.control.other} is closed")

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        control = self.control
        if isinstance(error, BlockingIOError):  # SO_RCVTIMEO, SO_SNDTIMEO
            control.close()  # where the next message begins is lost
            raise LinkError(f"{control.other} stopped within a message for {timeout_text(control.timeout)}") from None
        if isinstance(error, (EOFError, OSError)):
            if control.closed:
                raise LinkError(f"the link with {control.other} is closed") from None
            if isinstance(error, OSError) and error.errno is None:  # raised by Connection, not by the system
                control.close()
                raise LinkError(f"{control.other} said something that is not a message ({error})") from None
            raise LinkError(f"{control.other} is gone" + (f" ({error})" if str(error) else "")) from None
