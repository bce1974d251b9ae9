"""Scores responses in a pool of isolated worker processes, each response with a timeout.

A reward is user code that reads a policy's text: it may raise, hang, exit, print without end, start
processes or return nonsense.  Each of these becomes a `ScoreError` of that response alone; a worker
that does not answer is ended with everything that it started, and replaced.  The caller decides
whether a failed score ends the run.

Processes, because a hung thread cannot be ended and math-verify uses SIGALRM, which only the main
thread of a process may use.  Workers answer with msgpack of fixed types: nothing that they send
runs here.

Questions as functions take them, and the check of everything that a scorer answers.
"""

from __future__ import annotations

import asyncio
import json
import math
import queue
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count

import msgspec

from moerl.config.schema import TaskConfig
from moerl.core.episode_view import ScoreRequest
from moerl.core.errors import ScoreError
from moerl.core.types import Prompt, Score, reward_problem
from moerl.data.environments import make_environment
from moerl.data.reward_values import metrics_problem
from moerl.data.rewards import make_reward
from moerl.sandbox.isolation import (
    IsolatedProgram,
    Isolation,
    SandboxEnded,
    SandboxError,
    SandboxTimeout,
)
from moerl.sandbox.limits import import_paths, isolation_of
from moerl.scoring.worker import (
    Fault,
    Given,
    Setup,
    WorkerAnswer,
    WorkerRequest,
    decode_answer,
    encode,
)

_START_S = 120.0  # most seconds for a worker to import the task's functions
_GRACE_S = 2.0  # for a worker that limits its own children
_ATTEMPTS = 3  # at a request whose worker is ended by another process
# Python's messages where a process or a thread cannot be started.
_NO_PROCESS = ("Resource temporarily unavailable", "can't start new thread")
_WORKER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from moerl.scoring.worker import main; main()"
)


class ProcessScorer:
    """The `Scorer` of a function, and the replies of an environment, in worker processes."""

    def __init__(self, task: TaskConfig, workers: int, timeout_s: float) -> None:
        """Start workers on first use.  Raises ConfigError for an unusable reward."""
        isolation = isolation_of(task)
        make_reward(task)
        make_environment(task)
        self._environment = task.environment
        self._name = task.reward or task.dataset or task.name
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="scorer")
        self._workers: queue.LifoQueue[WorkerProcess] = queue.LifoQueue()
        self._all = [WorkerProcess(isolation, task, timeout_s) for _ in range(workers)]
        for worker in self._all:
            self._workers.put(worker)

    async def score(self, asked: Sequence[ScoreRequest]) -> list[Score | ScoreError]:
        """A Score or an error for each request, in order."""
        size = max(1, -(-len(asked) // len(self._all)))  # a share for each worker
        shares = [asked[start : start + size] for start in range(0, len(asked), size)]
        given = [[(prompt_of(one), one.episode) for one in share] for share in shares]
        answers = [one for share in await asyncio.gather(*map(self._ask, given)) for one in share]
        return [self._score_of(*pair) for pair in zip(answers, asked, strict=True)]

    async def reply(self, prompt: Prompt, responses: Sequence[str]) -> str:
        """Reply of task.environment, with the timeout of a reward.  Raises ScoreError."""
        (answer,) = await self._ask([(prompt, list(responses))])
        if answer.failure:
            what = f"environment {self._environment} {answer.failure}"
            raise ScoreError(f"{what} for {prompt.name}")
        return answer.text

    def close(self) -> None:
        """End all workers, running rewards included, with everything that they started."""
        for worker in self._all:
            worker.close()
        self._threads.shutdown(cancel_futures=True)

    def _score_of(self, answer: WorkerAnswer, asked: ScoreRequest) -> Score | ScoreError:
        answer = checked(answer, asked.episode.responses)
        if answer.score is not None:
            return answer.score
        return ScoreError(f"reward {self._name} {answer.failure} for {asked.prompt.name}")

    async def _ask(self, given: Sequence[tuple[Prompt, Given]]) -> list[WorkerAnswer]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._ask_worker, given)

    def _ask_worker(self, given: Sequence[tuple[Prompt, Given]]) -> list[WorkerAnswer]:
        """Answers of one worker, one response after the other; each has its own timeout."""
        worker = self._workers.get()
        try:
            return [worker.ask(prompt, one) for prompt, one in given]
        finally:
            self._workers.put(worker)


class WorkerProcess:
    """One worker process, started when it is needed and replaced when it did not answer."""

    def __init__(self, isolation: Isolation, task: TaskConfig, timeout_s: float) -> None:
        limits = task.limits
        self._isolation, self._timeout_s = isolation, timeout_s
        self._setup = Setup(
            task=replace(task, agent=replace(task.agent, models={})),  # without their keys
            scratch=isolation.scratch,
            cpu_s=limits.cpu_s or math.ceil(2 * timeout_s),
            timeout_s=timeout_s,
            reply_bytes=limits.reply_kb * 1024,
        )
        self._serials = count(1)
        self._program: IsolatedProgram | None = None
        self._lock = threading.Lock()  # of `_program` and `_closed`
        self._closed = False

    def ask(self, prompt: Prompt, given: Given) -> WorkerAnswer:
        """The worker's answer; whatever goes wrong is its failure.

        If another process has ended the worker, a new worker gets the question: at the end of a run
        workers may be killed before the controller, which must not record a failed score.
        """
        for _ in range(_ATTEMPTS):
            try:
                return self._asked(prompt, given)
            except SandboxEnded as error:
                self._end()
                why = str(error)
        return WorkerAnswer(0, failure=f"{why}, {_ATTEMPTS} times in a row")

    def _asked(self, prompt: Prompt, given: Given) -> WorkerAnswer:
        """Raises SandboxEnded."""
        serial = next(self._serials)
        fault: Fault = ""
        try:
            data = encode(WorkerRequest(serial, prompt, given))
        except (TypeError, ValueError, OverflowError) as error:
            return WorkerAnswer(
                serial, failure=f"cannot be given what msgpack cannot hold ({error})"
            )
        wait_s = self._timeout_s + (_GRACE_S if self._setup.scratch else 0.0)
        try:
            answer = decode_answer(self._opened().call(data, wait_s))
            if answer.serial == serial:
                if any(text in answer.failure for text in _NO_PROCESS):
                    self._end()  # its limit adds to the user's processes at its start
                return answer
            failure = "answered another request"
        except SandboxEnded:
            raise
        except SandboxTimeout:
            failure = f"took longer than task.score_timeout_s = {self._timeout_s}"
        except (SandboxError, OSError) as error:
            failure = str(error)
            fault = "start" if isinstance(error, _NotStarted) else ""
        except (msgspec.MsgspecError, UnicodeDecodeError):
            failure = "answered with bytes that are no answer"
        self._end()
        return WorkerAnswer(serial, failure=failure, fault=fault)

    def close(self) -> None:
        """End the worker for good."""
        with self._lock:
            self._closed = True
        self._end()

    def _end(self) -> None:
        with self._lock:
            sandbox, self._program = self._program, None
        if sandbox is not None:
            sandbox.close()

    def _opened(self) -> IsolatedProgram:
        with self._lock:
            if self._closed:
                raise SandboxError("was closed")
            if self._program is not None:
                return self._program
            python = [sys.executable, "-P", "-c", _WORKER, json.dumps(import_paths())]
            self._program = program = self._isolation.open(python)
        started = decode_answer(program.call(encode(self._setup), _START_S))
        if started.failure:
            raise _NotStarted(f"could not be started: {started.failure}")
        return program


class _NotStarted(SandboxError):
    """The worker cannot import the task's functions."""


def checked(answer: WorkerAnswer, responses: Sequence[str]) -> WorkerAnswer:
    """The answer to an episode; a score that cannot be used becomes a failure."""
    if answer.failure:
        return replace(answer, score=None)
    problem = "gave no score" if answer.score is None else refusal(answer.score, responses)
    return replace(answer, score=None, failure=problem, fault="reward") if problem else answer


_REASON = 2000  # most characters of a reason


def prompt_of(asked: ScoreRequest) -> Prompt:
    """With the text of the step, if the request is about a step."""
    if asked.step_begin < 0:
        return asked.prompt
    step = asked.episode.responses[-1][asked.step_begin :]
    return replace(asked.prompt, extra=asked.prompt.extra | {"step": step})


def usable_score(name: str, score: Score | None, asked: ScoreRequest) -> Score | ScoreError:
    """The score, if it can be used.  name: of the scorer, for the error."""
    problem = "gave no score" if score is None else refusal(score, asked.episode.responses)
    if score is None or problem:
        return ScoreError(f"{name} {problem} for {asked.prompt.name}")
    return score


def refusal(score: Score, responses: Sequence[str]) -> str:
    """Why a score cannot be used; "" if it can."""
    length = len(responses[-1])
    if score.turns and len(score.turns) != len(responses):
        return f"has rewards for {len(score.turns)} of {len(responses)} turns"
    steps = (value for _, value in score.text_steps)
    for number in (score.reward, *steps, *score.turns, *score.roles.values()):
        if problem := reward_problem(number):
            return f"gave {number}, which {problem}"
    if not 0.0 <= score.errors < math.inf:
        return f"counted {score.errors} errors"
    if problem := metrics_problem(score.metrics):
        return problem
    if len(score.reason) > _REASON:
        return f"gave a reason of {len(score.reason)} characters, more than {_REASON}"
    ends = [end for end, _ in score.text_steps]
    if ends != sorted(ends) or any(not 0 <= end <= length for end in ends):
        return f"has steps that end at characters {ends[:16]} of {length}"
    if len(ends) > length + 1:
        return f"has {len(ends)} steps in {length} characters"
    return ""
