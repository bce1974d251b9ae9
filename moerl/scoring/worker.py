"""A worker: the task's reward and environment, answering one request at a time.

In a sandbox, which has a scratch folder, a forked child answers each request, so that no response
changes the interpreter of the next response; elsewhere this process answers itself.  Processes that
a reward leaves behind end with its answer.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import shutil
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from moerl.config.schema import TaskConfig
from moerl.core.episode_view import EpisodeView
from moerl.core.types import Prompt, Score
from moerl.data.environments import make_environment
from moerl.data.reward_calls import Reward
from moerl.data.reward_values import BadReturn
from moerl.data.rewards import make_reward, prepare_reward
from moerl.runtime import reaper
from moerl.runtime.frames import HEAD, framed, own_connection, receive, send, size_in


@dataclass(frozen=True, slots=True)
class Setup:
    """First message to a worker."""

    task: TaskConfig
    scratch: str  # folder that is emptied after each request; "" = this process answers itself
    cpu_s: int
    timeout_s: float  # of a child
    reply_bytes: int


Given = EpisodeView | list[str]
"""An episode to score, or the responses to which the environment replies."""
Fault = Literal["", "start", "reward"]


@dataclass(frozen=True, slots=True)
class WorkerRequest:
    serial: int
    prompt: Prompt
    given: Given


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """A result or a failure, which continues "the reward ...".

    fault: of a failure that another response would meet too: the worker cannot start, or the reward
    returns no score.
    """

    serial: int
    score: Score | None = None
    text: str = ""
    failure: str = ""
    fault: Fault = ""


encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(WorkerRequest).decode
decode_answer = msgspec.msgpack.Decoder(WorkerAnswer).decode


class ScoringLoop:
    """The loop of a worker over its connection to the scorer."""

    def __init__(self, connection: socket.socket, setup: Setup) -> None:
        self._connection, self._setup = connection, setup
        self._reward: Reward = make_reward(setup.task)
        self._environment = make_environment(setup.task)
        reaper.become_subreaper()
        # Helpers that an import started stay; anything later ends with its request.
        self._helpers = reaper.descendants(os.getpid()) if reaper.has_children() else set()

    def serve(self) -> None:
        """Answer requests until the scorer closes the connection."""
        if self._setup.scratch:
            reaper.hide_memory(True)
        while data := receive(self._connection):
            job = _decode_request(data)
            data = self._in_child(job) if self._setup.scratch else self._here(job)
            if reaper.has_children():
                reaper.kill_descendants(self._helpers)
            if self._setup.scratch:
                _empty(Path(self._setup.scratch))
            send(self._connection, data)

    def _here(self, job: WorkerRequest) -> bytes:
        spent = int(time.process_time()) + 1
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (spent + self._setup.cpu_s, hard))
        return self._evaluated(job)

    def _in_child(self, job: WorkerRequest) -> bytes:
        """The answer of a forked child; nothing that it can reach leads to another answer."""
        if isinstance(job.given, EpisodeView):
            prepare_reward(self._setup.task, self._reward, job.prompt)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            self._be_child(job, write)
        os.close(write)
        with open(read, "rb", buffering=0) as answers:
            data, problem = self._child_answer(answers.fileno(), child)
        return data or encode(WorkerAnswer(job.serial, failure=problem))

    def _be_child(self, job: WorkerRequest, write: int) -> None:
        try:
            self._connection.close()
            os.setsid()
            reaper.hide_memory(False)
            resource.setrlimit(resource.RLIMIT_CPU, (self._setup.cpu_s, self._setup.cpu_s))
            data = self._evaluated(job)
            with open(write, "wb", closefd=False) as answers:
                answers.write(framed(data))
        finally:
            os._exit(0)

    def _child_answer(self, answers: int, child: int) -> tuple[bytes, str]:
        """A child's answer, of any bytes, and why it is missing."""
        deadline = time.monotonic() + self._setup.timeout_s
        data = b""
        watched = select.poll()
        watched.register(answers, select.POLLIN)
        while len(data) < HEAD or len(data) < HEAD + size_in(data):
            if not watched.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
                return b"", f"took longer than task.score_timeout_s = {self._setup.timeout_s}"
            part = os.read(answers, 1 << 16)
            data += part
            if not part:
                return b"", _how_it_ended(child)
            if len(data) >= HEAD and size_in(data) > self._setup.reply_bytes:
                return b"", f"answered with {size_in(data)} bytes, {_TOO_LONG}"
        return data[HEAD:], ""

    def _evaluated(self, job: WorkerRequest) -> bytes:
        """An encoded answer; a user's function may raise or return anything."""
        try:
            data = encode(self._evaluate(job))
        except BaseException as error:
            fault: Fault = "reward" if isinstance(error, BadReturn) else ""
            data = encode(WorkerAnswer(job.serial, failure=one_line(error), fault=fault))
        if len(data) > self._setup.reply_bytes:
            problem = f"answered with {len(data)} bytes, {_TOO_LONG}"
            data = encode(WorkerAnswer(job.serial, failure=problem))
        return data

    def _evaluate(self, job: WorkerRequest) -> WorkerAnswer:
        if isinstance(job.given, EpisodeView):
            return WorkerAnswer(job.serial, score=self._reward(job.prompt, job.given))
        assert self._environment is not None, "a reply without task.environment"
        text = self._environment(job.prompt, job.given)
        if not isinstance(text, str):
            wanted = "want text (empty: the episode ends)"
            return WorkerAnswer(job.serial, failure=f"returned {type(text).__name__}, {wanted}")
        return WorkerAnswer(job.serial, text=text)


_TOO_LONG = "more than task.limits.reply_kb allows"


def _empty(folder: Path) -> None:
    """Remove the files that a child left in its scratch folder."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def one_line(error: BaseException) -> str:
    """The error, short and without control characters: a policy may have written it."""
    try:
        text = " ".join(str(error).split())
    except BaseException:
        text = "without a readable message"
    plain = "".join(character if character.isprintable() else "?" for character in text[:300])
    raised = "" if isinstance(error, BadReturn) else f"raised {type(error).__name__}: "
    return f"{raised}{plain}".encode(errors="replace").decode()


def _how_it_ended(child: int) -> str:
    """About a child that closed its connection; if it has not ended it gets 0.2 s."""
    for _ in range(40):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                return f"was ended by {signal.Signals(-code).name}"
            return f"ended its process with exit code {code}"
        time.sleep(0.005)
    return "closed its connection"


def main() -> None:
    """Take the Setup, report that the task's functions are loaded, and serve."""
    connection = own_connection()
    setup = msgspec.msgpack.decode(receive(connection), type=Setup)
    try:
        worker = ScoringLoop(connection, setup)
    except BaseException as error:
        send(connection, encode(WorkerAnswer(0, failure=one_line(error))))
        return
    send(connection, encode(WorkerAnswer(0)))
    with contextlib.suppress(OSError):  # the scorer has ended
        worker.serve()
