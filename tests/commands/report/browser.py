"""A headless Chromium, driven over its DevTools pipe with the standard library; only the browser is installed."""

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"),
    *("--no-first-run", "--disable-background-networking"),
)
SECONDS = 60


def find_browser() -> str | None:
    """Return BROWSER_PATH, or the first of NAMES that is installed."""
    return os.environ.get("BROWSER_PATH") or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser process, as a context manager.

    complaints:  console messages and exceptions of the page since `open`
    requests:    URLs that the page requested since `open`
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.numbers = itertools.count(1)
        self.buffer = b""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.loaded = False

    def __enter__(self) -> Self:
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self.command_pipe = os.pipe()
        self.answer_pipe, answers = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, answers)]  # keeps 3 and 4 free
        start = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}'
        self.process = subprocess.Popen(
            ["bash", "-c", start, "browser", self.path, *FLAGS, f"--user-data-dir={self.profile.name}"],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (commands, answers, *ends):
            os.close(end)
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.command_pipe)
        os.close(self.answer_pipe)
        self.profile.cleanup()

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> float:
        """Open the page; return the seconds until it is loaded and painted."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.complaints, self.requests, self.loaded = [], [], False
        begin = time.perf_counter()
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not self.loaded:
            self._receive()
        self.evaluate("new Promise(resolve => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
        return time.perf_counter() - begin

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """Move the pointer; x, y: CSS pixels of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def tap(self, x: float, y: float) -> None:
        """Put a finger down and lift it."""
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.command_pipe, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        """Return the next message; an event also updates the fields of the browser."""
        while b"\0" not in self.buffer:
            assert select.select([self.answer_pipe], [], [], SECONDS)[0], "the browser has not answered for a minute"
            part = os.read(self.answer_pipe, 1 << 20)
            assert part, "the browser has ended"
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(line)
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded":
            self.complaints.append(str(params["entry"]))
        return message
