"""Ranks of a worker program, forked from one process that has torch and Megatron loaded.

Importing them takes longer than most worker programs run.  `run_ranks` is for programs of
tests/helpers that need a trainer, not its launcher; the launcher itself runs in
test_processes.py and in every `moerl train` of a test.  `run_code` is for a test that needs a
process of its own.

The server reads requests on its standard input, one JSON line each, and answers with exit codes.
It starts no thread, so that forking it is safe; the store where ranks meet is the caller's.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from moerl.distributed.store_server import StoreServer
from moerl.distributed.token_store import VARIABLE, store_variable
from tests.helpers.patience import patience
from tests.helpers.trainer_support import ROOT

_PLACE = os.environ.get(VARIABLE, "")  # of the store; a trainer's start takes it
_SERVERS = {
    "cpu": "tests.helpers.rank_server",
    "double": "tests.double.rank_server",  # on the device double
    "te": "tests.helpers.te_rank_server",  # with the stand-in for Transformer Engine
}
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": str(ROOT),
    "PYTHONWARNINGS": "ignore",
}
PLATFORM = "TEST_PLATFORM"  # environment variable: where a worker program trains; "" is the CPU
_running: dict[str, subprocess.Popen[str]] = {}  # by module
_GRACE_S = 5.0  # for the others of a failed rank to say what they saw


@dataclass(frozen=True, slots=True)
class Request:
    arguments: list[str]  # FILE, -m MODULE or -c CODE, then its own arguments
    environments: list[dict[str, str]]  # of each rank, beyond the server's own
    logs: list[str]  # standard output and error of each rank
    timeout_s: float
    input: str = os.devnull  # file of standard input
    errors: str = ""  # file of standard error; "" = the rank's log


# --- the caller's side ---------------------------------------------------------------------------
def run_ranks(
    ranks: int, arguments: list[str], *, timeout_s: float = 120.0, on: str = "cpu"
) -> str:
    """Run `python ARGUMENTS` on that many ranks; returns the output, raises with it on failure.

    on: cpu; double, with the device double loaded (tests/double); te, with the stand-in for
    Transformer Engine; or gpu, one rank.
    """
    codes, outputs = end_of_ranks(ranks, arguments, timeout_s=timeout_s, on=on)
    output = "".join(outputs)
    assert not any(codes), f"exit codes {codes}\n{output[-6000:]}"
    return output


def end_of_ranks(
    ranks: int, arguments: list[str], *, timeout_s: float = 120.0, on: str = "cpu"
) -> tuple[list[int], list[str]]:
    """The same, which may fail: exit codes and outputs by rank."""
    store = StoreServer("127.0.0.1", slots=1)
    shared = store_variable(store.server_address, 0) | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}" for rank in range(ranks)]
        own = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        request = Request(arguments, own, [str(log) for log in logs], patience(timeout_s))
        codes = _alone(request) if on == "gpu" else _ask(request, _server(_SERVERS[on]))
        outputs = [log.read_text() for log in logs]
    store.close()
    return codes, outputs


def run_code(
    code: str, *arguments: str, input: str = "", timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """`python -c CODE ARGUMENTS` in a process that has torch and Megatron for the CPU loaded."""
    words = ["-c", code, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        given, out, errors = (Path(folder) / name for name in ("input", "output", "errors"))
        given.write_text(input)
        request = Request(
            words, [{}], [str(out)], patience(timeout_s), input=str(given), errors=str(errors)
        )
        (ended,) = _ask(request, _server(_SERVERS["cpu"]))
        return subprocess.CompletedProcess(words, ended, out.read_text(), errors.read_text())


def start_server(on: str = "cpu") -> None:
    """Let the process of `run_ranks` import Megatron while other work goes on."""
    _server(_SERVERS[on])


def meet_apart(number: int) -> None:
    """In a rank that starts several trainers: those of trainer `number` find no others' values."""
    os.environ[VARIABLE] = json.dumps(json.loads(_PLACE) | {"round": number})


def _alone(request: Request) -> list[int]:
    """One rank in a process of its own: one that has used CUDA cannot be forked."""
    (own,), (log,) = request.environments, request.logs
    environment = os.environ | _ENVIRONMENT | own | {PLATFORM: "cuda"}
    with Path(log).open("w") as out:
        done = subprocess.run(
            [sys.executable, *request.arguments],
            cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT,
            timeout=request.timeout_s, check=False,
        )  # fmt: skip
    return [done.returncode]


def _ask(request: Request, server: subprocess.Popen[str]) -> list[int]:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(asdict(request)) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, f"the rank server ended with {server.wait()}"
    codes: list[int] = json.loads(answer)
    return codes


def _server(module: str) -> subprocess.Popen[str]:
    """The server; another one after the end of the first: some tests end every child."""
    if (running := _running.get(module)) is not None and running.poll() is None:
        return running
    server = _running[module] = subprocess.Popen(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env=os.environ | _ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    """It ends when its standard input does."""
    assert server.stdin is not None
    server.stdin.close()
    server.wait(patience(30))


# --- the server ----------------------------------------------------------------------------------
def main() -> int:
    """Serve until standard input ends; a forked rank returns from here with its exit code.

    sys.argv: the platform of the ranks, if it is not the CPU.
    """
    _load(*sys.argv[1:])
    while line := _request_line():
        request = Request(**json.loads(line))
        running: dict[int, int] = {}  # pid -> rank
        for rank in range(len(request.logs)):
            pid = os.fork()
            if not pid:
                return _be(request, rank)
            running[pid] = rank
        print(json.dumps(_wait(running, request.timeout_s)), flush=True)
    return 0


def _load(name: str = "cpu") -> None:
    """What worker programs import, in their order; without threads, or forking is not safe."""
    from moerl.trainer.model import platform

    platform.prepare(name, impl="local")
    import megatron.core

    from moerl.trainer.checkpoints import checkpoint  # noqa: F401
    from moerl.trainer.hf_io import hf_folder  # noqa: F401
    from moerl.trainer.learner import critic, step  # noqa: F401
    from moerl.trainer.model import gpt, parallel  # noqa: F401

    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads after the imports of {megatron.core.__name__}"


def _request_line() -> str:
    """Unbuffered, so that `select` in `_wait` sees all that was not read."""
    read = b""
    while not read.endswith(b"\n"):
        more = os.read(0, 1)
        if not more:
            return ""
        read += more
    return read.decode()


def _wait(running: dict[int, int], timeout_s: float) -> list[int]:
    """Exit codes by rank; the others are killed after one failed, and all after the time."""
    codes = dict.fromkeys(running.values(), 0)
    deadline = time.monotonic() + timeout_s
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            codes[running.pop(pid)] = code = os.waitstatus_to_exitcode(status)
            if code:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            continue
        caller_ended = bool(select.select([0], [], [], 0.01)[0])
        if caller_ended or time.monotonic() > deadline:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
    return [codes[rank] for rank in sorted(codes)]


def _be(request: Request, rank: int) -> int:
    """The rank's whole life: its own output and environment, then the program."""
    log = request.logs[rank]
    for number, file in ((1, log), (2, request.errors or log)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.dup2(os.open(request.input, os.O_RDONLY), 0)
    os.environ.update(request.environments[rank])
    try:
        _run_program(request.arguments)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _run_program(arguments: list[str]) -> None:
    """As `python ARGUMENTS` would."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    sys.exit(main())
