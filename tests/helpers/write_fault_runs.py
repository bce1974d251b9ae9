"""The write sweep: one small run per fault, in a process of its own, then its resume.

    python -m tests.helpers.write_fault_runs FOLDER SHARE [BEFORE SITES]

The run has the real controller, journal, metrics, samples, blob store, checkpoint folder, state and
HF folder; engine, scorer and trainer are stubs, so it takes a fraction of a second.  Each fault is
one use of one call site (`tests.helpers.write_faults`).  Prints one JSON object.

SHARE: every so many of the faults.  BEFORE: name of an earlier, faulty form of the code to put
back, as a negative control, with a part of the names of the sites to try.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from moerl.config import save_config
from moerl.config.schema import CheckpointConfig, EngineConfig, RolloutConfig
from moerl.controller.context import Services
from moerl.controller.controller import Controller
from moerl.controller.journal.journal import Journal
from moerl.controller.step_metrics import StepReport
from moerl.core.ids import IdSet
from moerl.core.messages import Hello, Ok, Plan, Refresh, StepDone, TakePlan
from moerl.core.types import ModelShape, PolicyVersion
from moerl.layout import hf_shapes, model_spec
from moerl.observe import metrics as metrics_module
from moerl.observe.metrics import MetricsWriter, read_rows
from moerl.records import BlobStore
from moerl.runtime import disk_wait
from moerl.runtime.beside import LineWriter
from moerl.runtime.run_dir import RunDir, next_incarnation, write_pids
from moerl.trainer.checkpoints.checkpoint_files import damage, newest_checkpoint, set_aside
from moerl.trainer.checkpoints.checkpoint_store import CheckpointStore
from tests.helpers.controllers import CONFIG, EqualFor, Prompts, publish
from tests.helpers.patience import patience
from tests.helpers.saved_hf import save_hf
from tests.helpers.stub_engine import SealingEngine
from tests.helpers.write_faults import KILLED, KINDS, Fault, WriteSites

STEPS, EVERY, GROUPS = 6, 2, 2
DROPPED = 5  # every fifth group has equal rewards and is dropped
BEGUN, TRAINING, TRAINED = range(3)
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 8,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 8,
    "moe_intermediate_size": 4,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
RUN_CONFIG = replace(
    CONFIG,
    run=replace(CONFIG.run, steps=STEPS),
    engine=EngineConfig(count=1),
    rollout=RolloutConfig(
        groups_per_step=GROUPS, group_size=2, max_lag=2, buffer_depth=2,
        selection="strict", drop_zero_variance=True,
    ),
)  # fmt: skip


@dataclass
class Progress:
    step: int = 0
    consumed: list[int] = field(default_factory=list)
    begins: list[tuple[int, int]] = field(default_factory=list)  # versions of earlier starts


class StubTrainer:
    """Speaks the protocol, and writes a checkpoint of what it was given."""

    def __init__(self, run: RunDir, incarnation: int, newest: Path | None) -> None:
        self.run, self.incarnation = run, incarnation
        self.store = CheckpointStore(run, CheckpointConfig(keep=2), incarnation)
        self.store.clean()
        self.progress = Progress()
        while newest is not None:
            if not (cause := damage(newest, ["state.json"])):
                self.progress = Progress(**json.loads((newest / "state.json").read_text()))
                break
            set_aside(newest, cause)
            newest = newest_checkpoint(run)
        self.progress.begins.append((incarnation, self.progress.step))

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.incarnation, self.progress.step)

    async def train(self, controller: Controller) -> None:
        consumed = IdSet(ids=self.progress.consumed).parts
        begins = tuple(PolicyVersion(*start) for start in self.progress.begins)
        assert await controller.handle(Hello(1, 1, self.version, consumed, begins)) == Ok()
        if self.version != PolicyVersion(0, 0):
            await publish(controller, self.version)
        while self.progress.step < STEPS:
            ask = TakePlan(self.progress.step, 20.0, self.incarnation)
            while (reply := await controller.handle(ask)) == Refresh():
                await publish(controller, self.version)
            assert isinstance(reply, Plan), reply
            self.progress.consumed += [group.group_id for group in reply.plan.groups]
            self.progress.step += 1
            await controller.handle(StepDone(reply.plan.step, self.version, {"loss/pg": 0.0}, ""))
            await publish(controller, self.version)
            if self.progress.step % EVERY == 0 and self.progress.step < STEPS:
                self.save()

    def save(self) -> None:
        hidden = self.store.hidden(self.progress.step)
        try:
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir(parents=True)
            state = {"step": self.progress.step, "consumed": self.progress.consumed}
            (hidden / "state.json").write_text(json.dumps(state))
            (hidden / "metadata.json").write_text("{}")
            self.store.publish(self.progress.step, {"version": str(self.version)}, {})
        except OSError:  # this checkpoint is lost; the last one must succeed
            shutil.rmtree(hidden, ignore_errors=True)
            if self.progress.step == STEPS:
                raise


def live(root: Path, at: Callable[[int], None]) -> None:
    """One start of the run, to its end.  at: told of each phase."""
    at(BEGUN)
    run = RunDir(root / "run")
    run.create()
    save_config(RUN_CONFIG, run.config)
    newest = newest_checkpoint(run)
    incarnation = next_incarnation(run, resume=True)
    run.endpoints.open("tcp://127.0.0.1:1", "token")
    write_pids(run, {"root": os.getpid()})
    asyncio.run(_train(root, run, StubTrainer(run, incarnation, newest), at))
    tensors = {name: torch.zeros(shape) for name, shape in hf_shapes(model_spec(MODEL)).items()}
    save_hf(run.hf, tensors, root / "model")
    run.endpoints.done("start")
    run.endpoints.close()


async def _train(root: Path, run: RunDir, trainer: StubTrainer, at: Callable[[int], None]) -> None:
    metrics, samples = MetricsWriter(run.metrics), LineWriter(run.samples)
    blobs = BlobStore(root / "blobs", "n")

    def add(report: StepReport) -> None:
        metrics.write(report.step, report.version, report.metrics)
        samples.write([{"step": report.step, "response": "x"}])

    def rewind(step: int) -> None:
        metrics.rewind(step)
        samples.rewind(step)

    services = Services(
        model=ModelShape(10, 1, (0,), 4, top_k=2),
        engines={0: SealingEngine(blobs)},
        sizes={0: 1},
        scorer=EqualFor(lambda index: index % DROPPED == DROPPED - 1),
        prompts=Prompts(),
        decode=lambda ids: " ".join(map(str, ids)),
        encode=lambda text: [int(word) for word in text.split()],
        blobs=blobs,
        journal=Journal(run.journal, blobs),
        saved_steps=lambda: (run.latest_checkpoint() or (0,))[0],
        on_step=add,
        on_rewind=rewind,
    )
    controller = Controller(RUN_CONFIG, services)
    controller.engines_started()
    at(TRAINING)
    tasks = asyncio.create_task(controller.run())
    job = asyncio.create_task(trainer.train(controller))
    try:
        await asyncio.wait({tasks, job}, return_when=asyncio.FIRST_COMPLETED, timeout=patience(60))
        await (tasks if tasks.done() else job)
        at(TRAINED)
        trainer.save()
    finally:
        job.cancel()
        await controller.stop()
        with contextlib.suppress(BaseException):
            await tasks
        metrics.close()
        samples.close()


def in_child(root: Path, fault: Fault | None = None) -> tuple[int, dict[str, Any]]:
    """(exit status, {"uses", "phase", "error"}) of one start; killed when it hangs."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(90)
        phases, error, status = [BEGUN], "", 0
        sites = WriteSites(fault)
        try:
            live(root, phases.append)
        except BaseException:
            error, status = traceback.format_exc(), 3
        told = {"uses": sites.uses, "phase": phases[-1], "error": error}
        sites._plain["write"](writer, json.dumps(told).encode())
        os._exit(status)
    os.close(writer)
    with open(reader, "rb") as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, json.loads(text or "{}")


def wrong_in(root: Path) -> str:
    """What is not as in a run without faults; empty when all is."""
    run = RunDir(root / "run")
    try:
        steps = [row["step"] for row in read_rows(run.metrics)]
    except Exception as error:
        return f"metrics.jsonl: {error}"
    newest = run.latest_checkpoint()
    if steps != list(range(STEPS)):
        return f"rows of steps {steps}"
    if newest is None or newest[0] != STEPS or damage(newest[1], ["state.json"]):
        return f"the newest checkpoint is {newest}"
    consumed = json.loads((newest[1] / "state.json").read_text())["consumed"]
    ids = (one for one in range(10 * STEPS) if one % DROPPED != DROPPED - 1)
    expected = [next(ids) for _ in range(STEPS * GROUPS)]
    if sorted(consumed) != expected:
        return f"trained groups {sorted(consumed)}, not {expected}"
    if list(run.checkpoints.glob(".*.bad*")):
        return "a checkpoint was set aside"
    if not (run.hf / "config.json").is_file():
        return "there is no HF folder"
    return ""


def new_run(folder: Path) -> Path:
    root = folder / "one"
    shutil.rmtree(root, ignore_errors=True)
    (root / "model").mkdir(parents=True)
    (root / "model" / "config.json").write_text(json.dumps(MODEL))
    return root


def sweep(folder: Path, share: int, part: str) -> dict[str, Any]:
    root = new_run(folder)
    status, clean = in_child(root)
    assert status == 0, clean
    assert not wrong_in(root), wrong_in(root)
    faults = [
        Fault(site, use, kind)
        for site, uses in sorted(clean["uses"].items())
        if part in site
        for use in sorted({1, (uses + 1) // 2, uses})
        for kind in KINDS
    ]
    found: dict[str, Any] = {"sites": len(clean["uses"]), "faults": len(faults), "ran": 0}
    found |= {"ended a start": 0, "not reached": 0, "wrong": [], "ended in training": []}
    for fault in faults[::share]:
        _try(new_run(folder), fault, found)
    return found


def _try(root: Path, fault: Fault, found: dict[str, Any]) -> None:
    status, told = in_child(root, fault)
    found["ran"] += 1
    reached = status == KILLED or told.get("uses", {}).get(fault.site, 0) >= fault.use
    found["not reached"] += not reached
    if status:
        found["ended a start"] += 1
        if told.get("phase") == TRAINING:
            found["ended in training"].append([*fault, told["error"]])
        status, told = in_child(root)
    cause = told.get("error", "") if status else wrong_in(root)
    if status or cause:
        found["wrong"].append([*fault, cause or f"exit status {status}"])


# --- earlier forms of the code, as negative controls ---------------------------------------------
def _buffered_rows() -> None:
    """A row waits in a buffer when the disk is full, and is completed by the next flush."""

    def open_file(self: Any, path: Path, end: int) -> None:
        self._path, self._end = path, end
        self._text = path.open("a", encoding="utf-8")

    def append(self: Any, lines: bytes) -> int:
        self._text.write(lines.decode())
        self._text.flush()
        self._end += len(lines)
        return self._end

    def cut(self: Any, end: int) -> None:
        self._text.flush()
        if end < self._end:
            with self._path.open("r+b") as file:
                file.truncate(end)
            self._end = end

    line_file = metrics_module.LineFile
    line_file.__init__, line_file.append, line_file.cut = open_file, append, cut  # type: ignore
    line_file.close = lambda self: self._text.close()  # type: ignore


def _names_only() -> None:
    """A checkpoint is written under its final name."""

    def replace_in_place(hidden: Path, target: Path) -> None:
        target.mkdir()
        for path in sorted(hidden.iterdir()):
            with path.open("rb") as source, (target / path.name).open("wb") as file:
                file.write(source.read())

    CheckpointStore._replace = staticmethod(replace_in_place)  # type: ignore


BEFORE = {"rows": _buffered_rows, "names": _names_only}


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    disk_wait.PAUSE_S = 0.005
    torch.set_num_threads(1)
    _, place, every, *before = sys.argv
    if before:
        BEFORE[before[0]]()
    print(json.dumps(sweep(Path(place), int(every), before[1] if before else "")))
