"""Engine servers that are forks of one process that has SGLang loaded.

    python -m tests.helpers.warm_engines

Importing SGLang takes longer than most servers of tests run.  `EngineServer` and all that it does
are the product's; the server is a fork in place of a new Python (tests/e2e/test_engine_e2e.py and
each `moerl train` start the real one).  Requests come on standard input, one JSON line each.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from moerl.engine.host import sglang_server
from moerl.engine.host.sglang_server import EngineServer
from tests.helpers.family_servers import ForkedServer, forked, import_sglang, run_family, wait

ROOT = Path(__file__).resolve().parents[2]


class WarmEngines:
    """The process that is forked."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.helpers.warm_engines"],
            cwd=ROOT,
            env=os.environ | {"TORCHDYNAMO_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> int | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process of warm engines ended with {self._process.wait()}"
        answer: int | None = json.loads(line)
        return answer

    @contextmanager
    def serving(self) -> Iterator[None]:
        """EngineServer starts its servers here."""
        spawn = partial(_spawn, self)
        with mock.patch.object(EngineServer, "_spawn", lambda server: spawn(server)):
            yield

    def run_family(self, family: str, folder: Path) -> None:
        """A family of tests/helpers/family_servers.py, from start to end."""
        self.ask(family=family, folder=str(folder))

    def is_alive(self) -> bool:
        """Whether it runs: a test that ends every child of pytest ends it, and its servers."""
        return self._process.poll() is None

    def close(self) -> None:
        """Servers end with the process, and it ends with its standard input."""
        self._process.communicate()


class WarmServer(ForkedServer):
    """Its parent is the process that was forked."""

    def __init__(self, warm: WarmEngines, **server: Any) -> None:
        self._warm, self._code = warm, None
        pid = warm.ask(server=server)
        assert pid is not None
        self.pid = pid

    def poll(self) -> int | None:
        if self._code is None:
            alive = self._warm.is_alive()
            self._code = self._warm.ask(poll=self.pid) if alive else -signal.SIGKILL
        return self._code


def _spawn(warm: WarmEngines, server: EngineServer) -> None:
    assert server._scratch is not None
    server.log.parent.mkdir(parents=True, exist_ok=True)
    environment = server._environment() | sglang_server._private(server._scratch.path)
    server._process = WarmServer(  # type: ignore[assignment]
        warm,
        environment=environment | server.span.environment(),
        log=str(server.log),
        args=server.args,
        token=server.token,
    )


# --- the process ----------------------------------------------------------------------------------
class _Server:
    """The fields of EngineServer that a fork reads."""

    def __init__(self, log: str, args: dict[str, Any], token: str) -> None:
        self.log, self.args, self.token = Path(log), args, token


def main() -> int:
    import_sglang()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads after the imports"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    servers: dict[int, ForkedServer] = {}
    for line in sys.stdin:
        try:
            answer = _answer(servers, **json.loads(line))
        except Exception:
            traceback.print_exc()
            return 1
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def _answer(
    servers: dict[int, ForkedServer],
    server: dict[str, Any] | None = None,
    poll: int = 0,
    family: str = "",
    folder: str = "",
) -> int | None:
    if poll:
        return servers[poll].poll()
    if family:
        wait(forked(Path(folder), partial(run_family, family)))
        return None
    assert server is not None
    environment = server.pop("environment")
    started = ForkedServer(_Server(**server), environment)
    servers[started.pid] = started
    return started.pid


if __name__ == "__main__":
    sys.exit(main())
