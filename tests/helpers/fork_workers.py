"""Pytest plugin: `--forks N` runs the collected tests in N processes that are forked.

A fresh Python collects the tests for half a minute of a core, so they are collected once.  The
tests of one file, or of files that share a fixture of the session, run in one worker, in their
order; the next free worker gets the next group.  A worker that ends in a test fails that test, and
another one takes the rest of its group.

Workers send reports; the first process runs no test, prints and writes what they say, and ends the
workers when it is interrupted.  pytest-xdist, whose workers each collect, was used before.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

import pytest

Group = deque[int]  # places in session.items
# Fixtures of a session that several files use, and the group of these files.
SHARED = {"short_run": "short_run", "engine_world": "engines", "warm_engines": "engines"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="processes that run tests")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    forks = session.config.getoption("--forks")
    if not forks or session.testsfailed or session.config.getoption("collectonly"):
        return None
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads after the imports of the tests: forking is not safe"
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()  # all that was imported: no worker looks through it again, or copies it
    _Workers(session, groups_of(session.items)).run(forks)
    return True


def groups_of(items: list[pytest.Item]) -> deque[Group]:
    """Tests by group, in the order in which they were collected."""
    groups: dict[str, Group] = {}
    for place, item in enumerate(items):
        groups.setdefault(group_of(item.path), Group()).append(place)
    return deque(groups.values())


@cache
def group_of(file: Path) -> str:
    """Files whose tests run in one worker: those that share a run or a server; else one file."""
    text = file.read_text(encoding="utf-8")
    groups = (group for name, group in SHARED.items() if re.search(rf"[ (]{name}: ", text))
    return next(groups, str(file))


@dataclass(slots=True, eq=False)
class _Worker:
    pid: int
    link: Connection[Any, Any]
    todo: Group = field(default_factory=Group)  # begins with the test that runs


@dataclass(slots=True)
class _Workers:
    """The first process's side."""

    session: pytest.Session
    groups: deque[Group]
    running: list[_Worker] = field(default_factory=list)
    started: int = 0

    def run(self, forks: int) -> None:
        try:
            for _ in range(min(forks, len(self.groups))):
                self.start()
            while self.running:
                for link in wait([worker.link for worker in self.running]):
                    self.hear(next(one for one in self.running if one.link is link))
                if self.session.shouldfail:
                    raise self.session.Failed(self.session.shouldfail)
        finally:
            self.end()

    def start(self) -> None:
        ours, theirs = Pipe()
        self.started += 1
        pid = os.fork()
        if not pid:
            for link in (ours, *(worker.link for worker in self.running)):
                link.close()
            _be_worker(self.session, theirs, self.started)
        theirs.close()
        self.running.append(_Worker(pid, ours))

    def hear(self, worker: _Worker) -> None:
        """Take one message: a report, the end of a test (its place), or None: it wants tests."""
        try:
            message = worker.link.recv()
        except (EOFError, ConnectionError):
            self.lose(worker)
            return
        if isinstance(message, int):
            assert worker.todo.popleft() == message
        elif message is not None:
            self.report(message)
        elif self.groups:
            worker.todo = self.groups.popleft()
            worker.link.send(list(worker.todo))
        else:
            worker.link.send([])

    def report(self, data: dict[str, Any]) -> None:
        hook, config = self.session.config.hook, self.session.config
        report = hook.pytest_report_from_serializable(config=config, data=data)
        hook.pytest_runtest_logreport(report=report)

    def lose(self, worker: _Worker) -> None:
        """It has ended: after its last test, or in a test."""
        self.running.remove(worker)
        worker.link.close()
        _, status = os.waitpid(worker.pid, 0)
        if not (worker.todo or status):
            return
        code = os.waitstatus_to_exitcode(status)
        item = self.session.items[worker.todo.popleft()] if worker.todo else self.session.items[-1]
        why = f"the worker ended with {code} in {item.nodeid}"
        report = pytest.TestReport(
            item.nodeid, item.location, {}, outcome="failed", longrepr=why, when="call"
        )
        self.session.config.hook.pytest_runtest_logreport(report=report)
        if worker.todo:
            self.groups.appendleft(worker.todo)
        if self.groups:
            self.start()

    def end(self) -> None:
        """Of workers that still run, one that waits sees its link end; others are interrupted."""
        for worker in self.running:
            worker.link.close()
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGINT)
        for worker in self.running:
            os.waitpid(worker.pid, 0)


# --- a worker ------------------------------------------------------------------------------------
class _Reports:
    """Plugin of a worker: its reports go to the first process."""

    def __init__(self, config: pytest.Config, link: Connection[Any, Any]) -> None:
        self._config, self._link = config, link

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self._link.send(hook.pytest_report_to_serializable(config=self._config, report=report))


def _be_worker(session: pytest.Session, link: Connection[Any, Any], number: int) -> None:
    """Run tests until there are none, then end this process."""
    code = 1
    try:
        _have_own_files(session.config, number)
        session.config.pluginmanager.register(_Reports(session.config, link))
        with suppress(KeyboardInterrupt, EOFError, ConnectionError):
            for place in _places(link):
                item = session.items[place]
                # the session's fixtures stay for the next test, whatever that is
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=session)
                link.send(place)
            code = 0
        session._setupstate.teardown_exact(None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        cast(Callable[[], None], vars(atexit)["_run_exitfuncs"])()
        sys.stderr.flush()
        os._exit(code)


def _have_own_files(config: pytest.Config, number: int) -> None:
    """Files of captured output, and a folder for temporary ones; the terminal is not its own."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture(in_=True)
    config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115
    factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"w{number}"
    factory._basetemp.mkdir(mode=0o700)


def _places(link: Connection[Any, Any]) -> Iterator[int]:
    while True:
        link.send(None)
        if not (places := link.recv()):
            return
        yield from places
