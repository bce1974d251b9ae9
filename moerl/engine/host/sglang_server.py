"""One SGLang HTTP server as a child process: start, watch, explain its death, stop.

A start that fails is reported within a second of the process's exit, in one sentence with the
exception it logged.  No process outlives the host: the server dies with its parent (see
`server_process`), `stop` kills its whole process tree.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from moerl.config.schema import EngineConfig
from moerl.config.transport_rules import ALLOCATOR, INTERFACES
from moerl.core.errors import EngineError
from moerl.core.json_files import read_json
from moerl.core.rpc import Keys
from moerl.engine import feature_table
from moerl.engine.host import cpu_kernels
from moerl.engine.host.scratch_dir import Scratch
from moerl.engine.host.server_args import server_args
from moerl.engine.host.sglang_client import EngineClient
from moerl.engine.node_span import ALONE, NodeSpan
from moerl.engine.protocol import DP_ATTENTION, model_type_of
from moerl.engine.record_files import FOLDER, RecordReader
from moerl.engine.weight_layout import (
    MODULES_CHECKED,
    LiveWeightLayout,
    asks_fp32_head,
    check_head,
    check_model,
    engine_layout,
)
from moerl.runtime.cuda_folder import compiler_environment
from moerl.weight_sync.receiver_names import keys_path, socket_path

_POLL_S = 0.1
_KILL_S = 5.0  # longest wait for a killed process to be gone
_ENDING_S = 1.0  # from the end of a server's first thread, and of its workers, to the end of all
_TAIL_LINES = 20

# `pkg.SomeError: text` at the start of a line, or uvicorn's `[Errno 98] ...` anywhere in it.
_EXCEPTION = re.compile(
    r"^(?:[\w.]+\.)?\w*(?:Error|Exception)(?:: .*)?$|\[Errno \d+\] .*$|^Fatal Python error: .*$"
)
# Exceptions that follow from the first failure.
_SECONDARY = re.compile(
    r"^(?:EOFError|BrokenPipeError|ConnectionResetError|requests\.|urllib3\.)|scheduler.*died"
)


class EngineServer:
    """Starts, watches and stops one server.  Not restartable: make a new one."""

    program: tuple[str, ...] = ("-m", "moerl.engine.plugin.server_process")  # Python's arguments

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        *,
        routing: bool,
        version: str,
        token: str,
        log: Path,
        port: int | None = None,
        span: NodeSpan = ALONE,
    ) -> None:
        """Make the server's arguments; `start` starts its process.

        span: the part of the engine that this node has.
        """
        self.config, self.log, self.token, self.span = config, log, token, span
        self.port = free_port(config.host) if port is None else port
        self.args = server_args(
            config,
            model_path,
            routing=routing,
            version=version,
            port=self.port,
            nccl_port=free_port("127.0.0.1"),
        )
        self.args |= span.arguments()
        self._model_path = model_path
        self.receiver_keys = Keys.make()
        self.layout: LiveWeightLayout | None = None  # layout of its weights; known once it serves
        self.records: RecordReader | None = None  # of ended requests, once it starts
        self._process: subprocess.Popen[bytes] | None = None
        self._children: list[psutil.Process] = []
        self._scratch: Scratch | None = None

    @property
    def url(self) -> str:
        return f"http://{self.config.host}:{self.port}"

    @property
    def receiver_sockets(self) -> list[Path]:
        """Sockets of the receivers of this node's ranks."""
        assert self._scratch is not None, "start first"
        return [socket_path(self._scratch.path, rank) for rank in self.span.ranks(self.config.tp)]

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    async def start(self, client: EngineClient) -> None:
        """Start the process and wait until it serves.

        Raises EngineError with the cause, ConfigError for a model SGLang would serve wrongly and
        for arguments under which it keeps weights in a layout that is not known.
        """
        path = self._model_path / "config.json"
        if not path.is_file():
            raise EngineError(f"engine: model folder {self._model_path} has no config.json")
        config = read_json(path)
        check_model(config)
        if self.args.get("device") == "cpu":
            cpu_kernels.check_kernels(self.config, config)
        stored = (config.get("quantization_config") or {}).get("quant_method")
        feature_table.check(
            "quantization", stored, replay=self.args["enable_return_routed_experts"]
        )
        if not _is_free(self.config.host, self.port):
            raise EngineError(f"engine: port {self.port} on {self.config.host} is in use")
        self._scratch = Scratch()
        try:
            self._prepare(self._scratch)
            self._spawn()
            deadline = time.monotonic() + self.config.start_timeout_s
            await self._wait_until_ready(client, deadline)
            self._check_listener()
            self._check_ranks()
            if self.span.node == 0:  # others have an HTTP server for /health only
                client.authenticate(self.token)
                self.layout = await self._identify(client, config, deadline)
                await client.freeze_garbage()
            self._children = self._workers()
            self._scratch.name_shared(path for one in self._tree() for path in _mapped(one))
        except BaseException:  # also when the caller is cancelled
            await self.stop()
            raise

    def _prepare(self, scratch: Scratch) -> None:
        try:
            self.receiver_keys.write(keys_path(scratch.path))
            (scratch.path / FOLDER).mkdir(mode=0o700)
        except OSError as error:
            raise EngineError(f"engine: {scratch.path} takes no keys: {error}") from error
        self.records = RecordReader(scratch.path / FOLDER)

    async def _wait_until_ready(self, client: EngineClient, deadline: float) -> None:
        while not await client.healthy():
            cause = self.death()
            if cause is None and time.monotonic() > deadline:
                cause = f"not ready after start_timeout_s = {self.config.start_timeout_s:g} s"
            if cause is not None:
                raise EngineError(f"engine did not start: {cause}\n{self.log_tail()}")
            await asyncio.sleep(_POLL_S)

    def _check_listener(self) -> None:
        """Raises EngineError unless a process of this server listens: only it may get the token."""
        address = (socket.gethostbyname(self.config.host), self.port)
        if not any(address in _listening(process) for process in self._tree()):
            raise EngineError(
                f"engine: another process answers at {self.url}; the server that was started does "
                f"not listen there, so nothing was sent to it\n{self.log_tail()}"
            )

    async def _identify(
        self, client: EngineClient, config: dict[str, Any], deadline: float
    ) -> LiveWeightLayout:
        """The layout of the live weights, from the arguments and from the check of each rank."""
        try:  # its HTTP server asks the ranks, of which one may hang
            async with asyncio.timeout(max(deadline - time.monotonic(), _KILL_S)):
                info = await client.server_info()
        except TimeoutError as error:
            cause = (
                self.death()
                or f"no server_info in start_timeout_s = {self.config.start_timeout_s:g} s"
            )
            raise EngineError(f"engine did not start: {cause}\n{self.log_tail()}") from error
        layout = engine_layout(info, self._environment(), config, release=str(info.get("version")))
        check_head(layout.fp32_head, trainer_fp32=asks_fp32_head(self.args))
        return layout

    def _check_ranks(self) -> None:
        """Raises EngineError unless all ranks of this node checked the layout of their weights."""
        wanted = len(self.span.ranks(self.config.tp))
        checked = self.log.read_text(errors="replace", encoding="utf-8").count(MODULES_CHECKED)
        if checked < wanted:
            raise EngineError(
                f"engine: {checked} of {wanted} ranks checked the layout of their weights; "
                "SGLang must load the plug-in moerl_hooks (see SGLANG_PLUGINS)"
            )

    def death(self) -> str | None:
        """One sentence on why the server is dead, or None while all its processes live."""
        assert self._process is not None, "start first"
        code = self._process.poll()
        if code is None and all(_alive(child) for child in self._children):
            return None
        if code is None:  # workers die with their server: a dead one may be seen first
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_ENDING_S)
        how = "a worker of the server ended" if code is None else f"server {_ending(code)}"
        return f"{how}: {cause_in(self._log_lines()) or 'no exception in its log'}"

    def log_tail(self) -> str:
        """The last lines of the server's log."""
        return "\n".join([f"--- end of {self.log} ---", *self._log_lines()[-_TAIL_LINES:]])

    async def stop(self) -> None:
        """Kill the server and all its processes.

        A graceful end saves nothing: SGLang checks for SIGTERM every 5 s only, and the host stores
        the records of requests.
        """
        try:
            if self._process is not None:
                await self._kill(self._process)
        finally:
            if self._scratch is not None:
                self._scratch.remove()

    async def _kill(self, server: subprocess.Popen[bytes]) -> None:
        tree = self._tree()
        for process in tree:
            _kill(process)
        server.kill()
        deadline = time.monotonic() + _KILL_S
        while any(_alive(process) for process in tree) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S / 2)
        server.wait(_KILL_S)

    def _spawn(self) -> None:
        # In the caller's thread: the kernel ends the server when the thread that forked it ends.
        assert self._scratch is not None, "start makes it"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        job = {"parent": os.getpid(), "token": self.token, "args": self.args}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self.program],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment() | _private(self._scratch.path) | self.span.environment(),
            )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode())
        self._process.stdin.close()

    def _environment(self) -> dict[str, str]:
        threads = str(self.config.cpu_threads)
        env = os.environ | compiler_environment(os.environ)
        for name in ("SGLANG_USE_CPU_ENGINE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
            env.pop(name, None)
        env |= {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
            # /health then answers at once instead of generating a token for a second.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        }
        if self.config.attention_dp > 1:
            env[DP_ATTENTION] = "1"
        if self.args.get("enable_memory_saver"):
            env |= saver_environment(env)
        if self.args.get("enable_return_indexer_topk"):
            # otherwise the indexer's kernel returns cache slots in place of positions
            env["SGLANG_DSA_FUSE_TOPK"] = "0"
        if self.config.host.startswith("127."):
            env |= dict.fromkeys(INTERFACES, "lo")
        if self.args.get("device") == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
            env |= cpu_kernels.environment_of(model_type_of(self._model_path))
        if self.args.get("device") == "cpu" and self.config.tp > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = _core_lists(
                self.config.tp, self.config.cpu_threads
            )
        return env

    def _tree(self) -> list[psutil.Process]:
        assert self._process is not None
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return [child for child in self._children if _alive(child)]

    def _workers(self) -> list[psutil.Process]:
        """SGLang's own processes (scheduler ranks, detokenizer); the server ends when one dies."""
        return [child for child in self._tree()[1:] if _is_worker(child)]

    def _log_lines(self) -> list[str]:
        return (
            self.log.read_text(errors="replace", encoding="utf-8").splitlines()
            if self.log.exists()
            else []
        )


def saver_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Variables of a server whose memory sleeps on a GPU.

    The saver maps memory itself and refuses torch's own mapping, expandable segments; NCCL would
    keep addresses of captured buffers.  Graphs stay awake: custom all-reduce exports their pool,
    and their copy would be page-locked in each sleep.
    Read at torch_memory_saver 0.0.10 (entrypoint.py, for one name of the variable only), sglang
    0.5.23 (srt/model_executor/runner_backend/full_cuda_graph_backend.py).
    """
    found = {"NCCL_GRAPH_REGISTER": "0", "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "0"}
    for name in ALLOCATOR:
        options = [option.strip() for option in env.get(name, "").split(",")]
        kept = [option for option in options if not option.startswith("expandable_segments")]
        found |= {name: ",".join(kept)} if name in env else {}
    return found


def free_port(host: str) -> int:
    """A free port, below the range that the kernel gives to outgoing connections."""
    for _ in range(200):
        port = random.SystemRandom().randrange(20000, 32000)
        if _is_free(host, port):
            return port
    raise EngineError(f"no free port between 20000 and 32000 on {host}")


def _private(folder: Path) -> dict[str, str]:
    """Environment by which a server keeps its sockets and its ranks' store in its own folder."""
    return {
        "TMPDIR": str(folder),
        # in place of torch's TCPStore on nccl_port, which listens on all interfaces
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{folder}/ranks",
    }


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def cause_in(lines: list[str]) -> str:
    """The last exception line of a log; a follow-up error only when no other is logged."""
    found = [match.group().strip() for line in lines if (match := _EXCEPTION.search(line))]
    first_hand = [line for line in found if not _SECONDARY.search(line)]
    return (first_hand or found or [""])[-1]


def _ending(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"exited with {code}"


def _core_lists(ranks: int, threads: int) -> str:
    """One core list per rank, `threads` cores each, wrapping around the cores we may use."""
    cores = sorted(os.sched_getaffinity(0))
    lists = [
        ",".join(str(cores[(rank * threads + i) % len(cores)]) for i in range(threads))
        for rank in range(ranks)
    ]
    return "|".join(lists)


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "sglang::" in " ".join(process.cmdline())
    except psutil.Error:  # a helper process that has ended
        return False


def _listening(process: psutil.Process) -> list[tuple[str, int]]:
    """(address, port) of the sockets on which a process waits for callers."""
    try:
        return [
            (found.laddr.ip, found.laddr.port)
            for found in process.net_connections("tcp")
            if found.status == psutil.CONN_LISTEN
        ]
    except psutil.Error:
        return []


def _mapped(process: psutil.Process) -> list[str]:
    """Files that a process maps."""
    try:
        return [entry.path for entry in process.memory_maps()]
    except psutil.Error:
        return []


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
