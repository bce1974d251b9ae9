"""The newest row of metrics.jsonl as Prometheus text, at one address behind the run's token.

    curl -H "Authorization: Bearer $(cat runs/NAME/endpoints/token)" http://127.0.0.1:PORT/metrics

Each scrape reads the end of the file, so a restarted controller changes nothing here.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moerl.core.errors import ConfigError
from moerl.observe.metrics import newest_row
from moerl.runtime.bearer_server import BearerHandler, BearerServer, CallerLimits
from moerl.runtime.run_dir import RunDir

PATH = "/metrics"
_KIND = "text/plain; version=0.0.4; charset=utf-8"
_STRANGE = re.compile(r"[^a-zA-Z0-9_]")


def exposition(row: Mapping[str, Any] | None, run: str) -> str:
    """Gauges `moerl_NAME{run="..."}`; other characters of a metric's name become underscores."""
    label = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    values: dict[str, float] = {}
    for name, value in (row or {}).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            values.setdefault(f"moerl_{_STRANGE.sub('_', name)}", value)
    return "".join(
        f'# TYPE {name} gauge\n{name}{{run="{label}"}} {value!r}\n'
        for name, value in values.items()
    )


class PrometheusServer:
    """Serves the newest row of a run on a thread, until `close`."""

    def __init__(self, run: RunDir, address: str, port: int, token: str) -> None:
        """Raises ConfigError when the port cannot be had."""
        limits = CallerLimits()
        about = {"metrics": run.metrics, "name": run.root.name, "token": token, "limits": limits}
        handler = type("Handler", (_Handler,), about)
        try:
            self._server = BearerServer((address, port), handler, limits.connections)
        except OSError as error:
            raise ConfigError(
                "observe.prometheus_port", port, f"{address}: {error.strerror}; use a free port"
            ) from error
        self.url = f"http://{address}:{self._server.server_address[1]}{PATH}"
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BearerHandler):
    metrics: Path
    name: str

    def do_GET(self) -> None:
        if not self.may_answer():
            return
        if self.path.partition("?")[0] != PATH:
            return self.answer(404)
        self.answer(200, exposition(newest_row(self.metrics), self.name).encode(), _KIND)
