"""A second model on loopback: an OpenAI-compatible endpoint that answers by script."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SAID = "the second model says so"


def completion(text: str = SAID) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "text": text, "finish_reason": "stop"}
    return {"id": "x", "object": "chat.completion", "model": "big", "choices": [choice]}


@dataclass
class StubModel:
    """body: of each answer.  hangs: it reads until its client is gone, and sends nothing."""

    base_url: str = ""
    status: int = 200
    body: bytes = field(default_factory=lambda: json.dumps(completion()).encode())
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    hangs: bool = False
    asked: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)  # a client has hung up


@contextmanager
def stub_model(**scripted: Any) -> Iterator[StubModel]:
    """scripted: fields of StubModel; base_url is made here."""
    stub = StubModel(**scripted)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["Content-Length"]))
            stub.asked.append((self.path, dict(self.headers), json.loads(sent)))
            if stub.hangs:
                self.rfile.read(1)
                stub.left.set()
                return
            self.send_response(stub.status)
            for name, value in stub.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(stub.body)))
            self.end_headers()
            self.wfile.write(stub.body)

        def log_message(self, *_: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub.base_url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
