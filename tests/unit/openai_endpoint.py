"""An endpoint of OpenAI's protocol on loopback, whose answers a test gives."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """A status with a body and headers; with `drip_s`, a byte of it each so many seconds; with `cut_off`, a body in
    chunks that ends in the middle of one."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    drip_s: float = 0.0
    cut_off: bool = False


@dataclass
class Asked:
    """A request."""

    path: str
    body: Any
    key: str | None


def chat(text: Any, reason: str | None = "stop", **fields: Any) -> Reply:
    """An answer to messages."""
    return Reply(
        {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}], **fields}
    )


def completion(text: str, reason: str = "stop", **fields: Any) -> Reply:
    """An answer to a text."""
    return Reply({"choices": [{"text": text, "finish_reason": reason}], **fields})


@contextmanager
def serving(answer: Callable[[Asked], Reply]) -> Iterator[tuple[str, list[Asked]]]:
    """The address, which ends in /v1, and the requests so far."""
    asked: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            request = Asked(self.path, body, self.headers["authorization"])
            asked.append(request)
            reply = answer(request)
            contents = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            length = ("transfer-encoding", "chunked") if reply.cut_off else ("content-length", str(len(contents)))
            self.send_header(*length)
            self.end_headers()
            contents = b"%x\r\n%s" % (len(contents) + 9, contents) if reply.cut_off else contents
            try:
                for at in range(len(contents)) if reply.drip_s else ():
                    self.wfile.write(contents[at : at + 1])
                    self.wfile.flush()
                    time.sleep(reply.drip_s)
                if not reply.drip_s:
                    self.wfile.write(contents)
            except OSError:
                pass  # the caller has left

        def log_message(self, format: str, *args: object) -> None:
            """Prints nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
