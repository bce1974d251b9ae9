"""A controller and engines for the trainer gang, without Ray and without SGLang.

The controller serves plans made of synthetic records; an engine joins the sync group as SGLang
does and keeps what was broadcast to it, so a test can compare it with the trainer's own weights.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
import zmq
from torch.distributed import distributed_c10d as c10d

from moerl.blob.store import BlobStore
from moerl.protocols import (
    CloseUpdate,
    Enlist,
    Failed,
    Hello,
    JoinSync,
    Message,
    Ok,
    OpenUpdate,
    Plan,
    Refused,
    Scored,
    StepDone,
    Stop,
    TakePlan,
    TakeRecords,
    UpdateClosed,
)
from moerl.rundir import RunDir
from moerl.types import BatchPlan, PolicyVersion
from moerl.wire import decode, encode
from tests.helpers.trainer_support import ROOT


class FakeEngine:
    """Receives bucketed broadcasts; `weights` is what it serves."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.versions: list[PolicyVersion] = []
        self._join: threading.Thread | None = None
        self._receive: threading.Thread | None = None

    def join(self, message: JoinSync) -> None:
        def work() -> None:
            store = dist.TCPStore(
                message.address, message.port, is_master=False, timeout=timedelta(seconds=30)
            )
            self._group, _ = c10d._new_process_group_helper(
                message.world_size,
                1,
                [],
                c10d.Backend(message.backend),
                c10d.PrefixStore(message.group, store),
                group_name=c10d.GroupName(message.group),
                timeout=timedelta(seconds=30),
            )
            c10d._world.pg_group_ranks[self._group] = {0: 0, 1: 1}

        self._join = threading.Thread(target=work, daemon=True)
        self._join.start()

    def open(self, message: OpenUpdate) -> None:
        assert self._join is not None
        self._join.join(30)

        def work() -> None:
            for bucket in message.buckets:
                dtypes = [getattr(torch, name) for name in bucket.dtypes]
                sizes = [
                    dtype.itemsize * torch.Size(shape).numel()
                    for dtype, shape in zip(dtypes, bucket.shapes, strict=True)
                ]
                flat = torch.empty(sum(sizes), dtype=torch.uint8)
                try:
                    dist.broadcast(flat, src=0, group=self._group)
                except RuntimeError:  # the gang ended in the middle of a publish
                    return
                pieces = flat.split(sizes)
                for name, dtype, shape, piece in zip(
                    bucket.names, dtypes, bucket.shapes, pieces, strict=True
                ):
                    self.weights[name] = piece.view(dtype).reshape(shape).clone()

        self._receive = threading.Thread(target=work, daemon=True)
        self._receive.start()

    def close(self, message: CloseUpdate) -> None:
        assert self._receive is not None
        self._receive.join(30)
        self.versions.append(message.version)


class FakeController:
    """Answers the gang from a thread; `plans(step)` gives a plan or None for Stop.

    fleets: by step, the engines that there are from its plan on.
    """

    def __init__(
        self,
        token: str,
        plans: Callable[[int], BatchPlan | None],
        fleets: Mapping[int, Enlist] | None = None,
    ) -> None:
        self.token, self.plans, self.fleets = token, plans, dict(fleets or {})
        self.engines: defaultdict[int, FakeEngine] = defaultdict(FakeEngine)
        self.hello: Hello | None = None
        self.steps: list[StepDone] = []
        self.failed: list[Failed] = []
        self.records: list[BatchPlan] = []  # for the frozen gang, each asked for once
        self.scored: list[Scored] = []
        self._answers: dict[bytes, bytes] = {}  # by name of the request
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.endpoint = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(10)
        self.socket.close()

    def _serve(self) -> None:
        while not self._stopping.is_set():
            if self.socket.poll(50):
                identity, token, name, data = self.socket.recv_multipart()
                if token.decode() != self.token:
                    self._answers[name] = encode(Refused("wrong token"))
                elif name not in self._answers:  # a slow answer is asked for again
                    self._answers[name] = encode(self._answer(decode(data)))
                self.socket.send_multipart([identity, name, self._answers[name]])

    def _answer(self, message: Message) -> Message:
        match message:
            case Hello():
                self.hello = message
            case TakePlan():
                if message.step in self.fleets:
                    return self.fleets.pop(message.step)
                plan = self.plans(message.step)
                return Plan(plan) if plan is not None else Stop("all steps are done")
            case StepDone():
                self.steps.append(message)
            case JoinSync():
                self.engines[message.engine].join(message)
            case OpenUpdate():
                self.engines[message.engine].open(message)
            case CloseUpdate():
                self.engines[message.engine].close(message)
                return UpdateClosed(pause_s=0.01, aborted=0)
            case TakeRecords():
                return Plan(self.records.pop(0)) if self.records else Stop("all are scored")
            case Scored():
                self.scored.append(message)
            case Failed():
                self.failed.append(message)
        return Ok()


def run_gang(
    controller: FakeController, run: RunDir, blobs: BlobStore, ranks: int, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run the trainer under torchrun to its end; closes the controller."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "moerl.trainer.main", *arguments]
    command += ["--run-dir", str(run.root), "--controller", controller.endpoint]
    command += ["--blob-dir", str(blobs.root), "--blob-node", "n0"]
    environment = os.environ | {
        "MOERL_TOKEN": controller.token,
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
    }
    try:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=150, check=False
        )
    finally:
        controller.close()
