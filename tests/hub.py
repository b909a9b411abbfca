"""A Hugging Face hub on loopback: the few answers that huggingface_hub asks for."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Repositories = Mapping[str, Mapping[str, bytes]]
"""`models/ORG/NAME` or `datasets/ORG/NAME` -> file -> its bytes."""
COMMIT = "c0ffee" + "0" * 34
"""The commit of every revision that is not a commit itself."""
_IN_PATH = re.compile(r"/(?:resolve|revision)/([0-9a-f]{40})(?:/|$)")


@contextmanager
def serving(repositories: Repositories) -> Iterator[tuple[str, list[str]]]:
    """The hub's address for HF_ENDPOINT, and the paths that are asked for, in order."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def log_message(self, format: str, *args: object) -> None:
            """Prints nothing."""

        def _answer(self, body: bool) -> None:
            path = self.path.partition("?")[0]
            asked.append(path)
            found = _found(repositories, path)
            self.send_response(404 if found is None else 200)
            contents = b"{}" if found is None else found
            self.send_header("Content-Length", str(len(contents)))
            self.send_header("X-Repo-Commit", _commit(path))
            self.send_header("ETag", f'"{hashlib.sha256(contents).hexdigest()}"')
            self.end_headers()
            if body:
                self.wfile.write(contents)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _found(repositories: Repositories, path: str) -> bytes | None:
    """The bytes at a path; None if there are none."""
    if listing := re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)/revision/.+", path):
        files = repositories.get(listing[1])
        return None if files is None else json.dumps(_listing(files, _commit(path))).encode()
    if file := re.fullmatch(rf"/(datasets/)?([^/]+/[^/]+)/resolve/{_commit(path)}/(.+)", path):
        kind = "datasets" if file[1] else "models"
        return repositories.get(f"{kind}/{file[2]}", {}).get(file[3])
    return None


def _commit(path: str) -> str:
    named = _IN_PATH.search(path)
    return named[1] if named else COMMIT


def _listing(files: Mapping[str, bytes], commit: str) -> dict[str, object]:
    """The description of a repository; weights have their SHA-256 in it."""
    siblings = []
    for name, contents in files.items():
        sibling: dict[str, object] = {"rfilename": name, "size": len(contents), "blobId": "0" * 40}
        if name.endswith(".safetensors"):
            digest = hashlib.sha256(contents).hexdigest()
            sibling["lfs"] = {"sha256": digest, "size": len(contents), "pointerSize": 100}
        siblings.append(sibling)
    return {"id": "org/name", "sha": commit, "siblings": siblings}
