"""The control connection of a link between processes: whole messages over TCP, and a timeout on every wait.

`Connection.send_bytes` and `recv_bytes` frame the messages; its `send` and `recv` would unpickle a stranger's bytes.
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
"""The largest message of fields, in bytes."""


class Control:
    """A connection of two processes. Every method raises LinkError if the other side is gone or silent.

    One thread may send while another one receives; any thread may close.

    connection: the socket, which belongs to this object from now on
    timeout:    seconds that a wait lasts, also a wait within a message
    peer:       the name of the other side in error messages
    """

    def __init__(self, connection: socket.socket, timeout: float, peer: str) -> None:
        self.timeout, self.peer, self.is_closed = timeout, peer, False
        self.local_host: str = connection.getsockname()[0]
        self.peer_host: str = connection.getpeername()[0]
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))  # struct timeval
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._connection = Connection(connection.detach())
        self._poll = select.poll()  # Connection.poll() would make one every time
        self._poll.register(self._connection.fileno(), select.POLLIN)

    def send(self, message: bytes) -> None:
        with _LinkErrors(self):
            self._connection.send_bytes(message)

    def receive(self, limit: int, forever: bool = False) -> bytes:
        """Return the next message.

        limit:   its largest size in bytes
        forever: wait for its beginning without a timeout
        """
        with _LinkErrors(self):
            if not self._poll.poll(None if forever else self.timeout * 1000):
                raise LinkError(f"{self.peer} was silent for {timeout_text(self.timeout)}")
            return self._connection.recv_bytes(limit)

    def is_readable(self, within: float = 0.0) -> bool:
        """Return True if a message begins, or the other side leaves, within so many seconds; `receive` tells which."""
        with _LinkErrors(self):
            return bool(self._poll.poll(1000 * within))

    def authenticate(self, token: str, is_caller: bool) -> None:
        """Prove that both sides know the run's token; the caller proves it first."""
        steps = (deliver_challenge, answer_challenge)
        with _LinkErrors(self):
            try:
                for step in reversed(steps) if is_caller else steps:
                    step(self._connection, token.encode())
            except AuthenticationError as error:
                raise LinkError(f"the run's token differs from that of {self.peer} ({error})") from None
            except (AssertionError, ValueError):  # Python 3.11, on bytes that are not a challenge
                raise LinkError(f"{self.peer} does not authenticate itself") from None

    def send_fields(self, **fields: str | int | list[int]) -> None:
        self.send(json.dumps(fields).encode())

    def receive_fields(self, **types: type) -> dict[str, Any]:
        """Receive a message that has at least these fields, of these types.

        Raises: LinkError, with the other side's reason if it refused
        """
        message = self.receive(MAX_GREETING)
        try:
            fields = json.loads(message)
        except (ValueError, RecursionError):
            fields = None
        if isinstance(fields, dict) and isinstance(fields.get("error"), str):
            raise LinkError(f"{self.peer}: {fields['error']}")
        if not isinstance(fields, dict) or any(type(fields.get(key)) is not t for key, t in types.items()):
            raise LinkError(f"{self.peer} sent {message[:80]!r}, which lacks the fields {sorted(types)}")
        return fields

    def refuse(self, error: Exception) -> None:
        """Send the reason to the other side, if it still listens, and close."""
        with suppress(LinkError):
            self.send_fields(error=str(error)[: MAX_GREETING // 16])  # JSON needs up to twelve bytes for a character
        self.close()

    def close(self) -> None:
        """Wake both sides if they wait. The descriptor is closed with this object: if it were closed while a thread
        waits on it, its number could become that of another file.
        """
        self.is_closed = True
        connection = socket.socket(fileno=self._connection.fileno())
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.detach()


class _LinkErrors:
    """Converts every failure of the connection in a block to a LinkError.

    This is not a `contextmanager`: with Python 3.12 the frames of one that raised refer to each other in a circle, and
    the link's end, with a GPU's memory, would stay until Python's collector runs.
    """

    def __init__(self, control: Control) -> None:
        self.control = control

    def __enter__(self) -> None:
        if self.control.is_closed:
            raise LinkError(f"the link with {self.control.peer} is closed")

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        control = self.control
        if isinstance(error, BlockingIOError):  # SO_RCVTIMEO, SO_SNDTIMEO
            control.close()  # the beginning of the next message is lost
            raise LinkError(f"{control.peer} stopped within a message for {timeout_text(control.timeout)}") from None
        if isinstance(error, (EOFError, OSError)):
            if control.is_closed:
                raise LinkError(f"the link with {control.peer} is closed") from None
            if isinstance(error, OSError) and error.errno is None:  # raised by Connection, not by the system
                control.close()
                raise LinkError(f"{control.peer} sent something that is not a message ({error})") from None
            raise LinkError(f"{control.peer} is gone" + (f" ({error})" if str(error) else "")) from None
