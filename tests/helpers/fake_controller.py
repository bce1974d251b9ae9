"""A controller and engines for the trainer, without Ray and without SGLang.

The controller serves plans made of synthetic records; an engine is a bare receiver of publish
sessions, so a test can compare what it serves with the trainer's own weights.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch

from moerl.core.errors import EngineError, MoerlError
from moerl.core.json_files import read_json
from moerl.core.messages import (
    AbortUpdate,
    AskEngine,
    CommitUpdate,
    EngineVersion,
    Failed,
    Hello,
    Message,
    Ok,
    Plan,
    PrepareUpdate,
    Refused,
    RelayUpdate,
    SamePlan,
    Scored,
    SessionMessage,
    SetEngines,
    StepDone,
    Stop,
    TakePlan,
    TakeRecords,
    UpdateDone,
    ValueRows,
    Values,
    VerifyUpdate,
)
from moerl.core.rpc import Keys, RpcServer
from moerl.core.types import BatchPlan, PolicyVersion
from moerl.layout import at, hf_shapes, model_spec, sglang_tiles
from moerl.records.blob_store import BlobStore
from moerl.runtime.run_dir import RunDir
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.receiver import Receiver, ReceiverContext
from moerl.weight_sync.transports.factory import make
from tests.helpers.patience import patience
from tests.helpers.rank_server import end_of_ranks
from tests.helpers.sync_peers import PlainModel
from tests.helpers.trainer_support import ROOT


class FakeEngine:
    """One engine rank: SGLang's tensors of the model, and a receiver that commits when asked."""

    def __init__(self, model: Path) -> None:
        self._spec = model_spec(read_json(model / "config.json"))
        self._tensors = {  # nan: what is never written is seen
            name: torch.full(local.shape, torch.nan)
            for name, local in sglang_tiles(self._spec, 1, 0).items()
        }
        self._receiver = Receiver(
            ReceiverContext(self._spec, EngineLayout(tp=1), 0, "layout"),
            PlainModel(self._tensors),
            lambda name, folder: make(name, address="127.0.0.1", folder=folder),
            PolicyVersion(0, 0),
        )
        self.versions: list[PolicyVersion] = []  # that it took

    def session(self, message: SessionMessage) -> Message:
        match message:
            case CommitUpdate():
                if cause := self._receiver.claim(str(message.version)):
                    raise EngineError(cause)
                self._receiver.commit()
                self.versions.append(message.version)
                return UpdateDone(pause_s=0.01, aborted=0)
            case AskEngine():
                return EngineVersion(self._receiver.held, "")
        return self._receiver.handle(message)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """What it serves, by the names of the Hugging Face folder."""
        shapes = hf_shapes(self._spec)
        whole = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
        for name, local in sglang_tiles(self._spec, 1, 0).items():
            for tile in local.tiles:
                whole[tile.hf][at(tile.hf_box)] = self._tensors[name][at(tile.box)]
        return whole


class FakeController:
    """Answers the trainer from a thread; `plans(step)` gives a plan or None for Stop.

    fleets: by step, the engines that there are from its plan on, which is given once those before
    took its version; model: of the engines.
    """

    def __init__(
        self,
        plans: Callable[[int], BatchPlan | None],
        fleets: Mapping[int, SetEngines] | None = None,
        model: Path | None = None,
        *,
        gives_ahead: bool = False,
    ) -> None:
        """gives_ahead: the plan of the next step comes with that of each step."""
        self.plans, self.fleets = cache(plans), dict(fleets or {})
        self.gives_ahead = gives_ahead
        self.model, self.engines = model, dict[int, FakeEngine]()
        self.hello: Hello | None = None
        self.steps: list[StepDone] = []
        self.failed: list[Failed] = []
        # For the reference ranks, each asked for once
        self.records: list[BatchPlan | ValueRows] = []
        self.scored: list[Scored] = []
        self.values: list[Values] = []
        self.keys = Keys.make()
        self._server = RpcServer("tcp://127.0.0.1:*", self.keys, self._handle)
        self.endpoint = self._server.endpoint
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(patience(10))
        self._server.close()

    async def _serve(self) -> None:
        serving = asyncio.ensure_future(self._server.serve())
        while not self._stopping.is_set():
            await asyncio.sleep(0.05)
        serving.cancel()

    async def _handle(self, message: Message) -> Message:
        while not self._is_due(message):
            await asyncio.sleep(0.05)
        return self._answer(message)

    def _is_due(self, message: Message) -> bool:
        if not isinstance(message, TakePlan) or message.step not in self.fleets:
            return True
        held = [{version.step for version in one.versions} for one in self.engines.values()]
        return all(message.step in steps for steps in held)

    def _answer(self, message: Message) -> Message:
        match message:
            case Hello():
                self.hello = message
            case TakePlan():
                if message.step in self.fleets:
                    return self.fleets.pop(message.step)
                return self._planned(message)
            case StepDone():
                self.steps.append(message)
            case (
                PrepareUpdate()
                | VerifyUpdate()
                | RelayUpdate()
                | CommitUpdate()
                | AbortUpdate()
                | AskEngine()
            ):
                return self._session(message)
            case TakeRecords():
                if not self.records:
                    return Stop("all are scored")
                wanted = self.records.pop(0)
                return wanted if isinstance(wanted, ValueRows) else Plan(wanted)
            case Scored():
                self.scored.append(message)
            case Values():
                self.values.append(message)
            case Failed():
                self.failed.append(message)
        return Ok()

    def _planned(self, take: TakePlan) -> Message:
        plan = self.plans(take.step)
        if plan is None:
            return Stop("all steps are done")
        ahead = self.plans(take.step + 1) if self.gives_ahead else None
        return SamePlan(ahead) if take.came_ahead else Plan(plan, ahead)

    def _session(self, message: SessionMessage) -> Message:
        if message.engine not in self.engines:
            assert self.model is not None, "engines need a model"
            self.engines[message.engine] = FakeEngine(self.model)
        try:
            return self.engines[message.engine].session(message)
        except MoerlError as error:
            return Refused(str(error))


def run_gang(
    controller: FakeController,
    run: RunDir,
    blobs: BlobStore,
    ranks: int,
    *arguments: str,
    launcher: bool = False,
    hook: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the trainer to its end; closes the controller.

    launcher: under torchrun, in place of ranks that are forked with Megatron loaded.
    hook: folder of a `sitecustomize` that changes its processes, for torchrun.
    """
    words = ["-m", "moerl.trainer.main", *arguments]
    words += ["--run-dir", str(run.root), "--controller", controller.endpoint]
    words += ["--blob-dir", str(blobs.root), "--blob-node", "n0"]
    run.endpoints.make_folder()
    controller.keys.write(run.endpoints.keys)
    try:
        if launcher or hook:
            return _launched(ranks, words, hook)
        codes, outputs = end_of_ranks(ranks, words, timeout_s=150.0)
        return subprocess.CompletedProcess(words, max(map(abs, codes)), stderr="".join(outputs))
    finally:
        controller.close()


def _launched(ranks: int, words: list[str], hook: Path | None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moerl.distributed.torchrun"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(map(str, filter(None, (hook, ROOT)))),
    }
    return subprocess.run(
        [*command, "--nproc-per-node", str(ranks), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(150),
        check=False,
    )
