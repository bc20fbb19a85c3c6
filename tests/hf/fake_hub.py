"""A Hugging Face hub of one model on loopback: as much of its HTTP as its own client asks for in a download."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def fake_hub(name: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serves `folder` as the model `name`; its address, and the paths of the files that were downloaded."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    downloads: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, with_body: bool) -> None:
            path = self.path.split("?")[0]
            headers = {"X-Repo-Commit": COMMIT}
            if path in (f"/api/models/{name}", f"/api/models/{name}/revision/main"):
                body = json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode()
            elif path == f"/api/models/{name}/tree/{COMMIT}":
                tree = [{"type": "file", "path": file, "size": len(b), "oid": digest(b)} for file, b in files.items()]
                body = json.dumps(tree).encode()
            elif (found := re.fullmatch(f"/{name}/resolve/(?:main|{COMMIT})/(.+)", path)) and found[1] in files:
                body = files[found[1]]
                headers["ETag"] = f'"{digest(body)}"'
                if with_body:
                    downloads.append(found[1])
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            for header, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(header, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", downloads
    finally:
        server.shutdown()
        server.server_close()


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
