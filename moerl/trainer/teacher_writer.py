"""Versions of the policy that become teachers: copied, then written while training continues.

`publish` stops training only for a copy of the weights to host memory (of the factors with
adapters).  A thread of each rank then writes its part of the folder, over a gloo group of its own.
Reference ranks, or the trainer itself, read from it what their layout holds; the folder also
outlives every process, so a restart finds the teacher that a step wants.

A version is written before a checkpoint of a later step begins.  The version of the checkpoint's
own step is written again after a resume, if it is missing.  Folders that neither the oldest
checkpoint nor the steps to come want are removed.

Rejected: weights sent to the reference ranks (their restart, and a resume, would need a second
source); teachers inside the checkpoint (its step is seldom theirs).
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.config.algorithms import followers_of
from moerl.config.schema import Config, TeacherConfig
from moerl.core.errors import TrainerError
from moerl.core.types import PolicyVersion
from moerl.data.teacher_versions import teacher_folder, teacher_step, version_at
from moerl.distributed.object_collectives import broadcast_value
from moerl.layout import hf_shapes
from moerl.runtime.disk_wait import DiskPatience
from moerl.runtime.run_dir import RunDir
from moerl.runtime.trace import Tracer
from moerl.trainer.hf_io.adapter_files import gather_factors, load_adapter, save_adapter
from moerl.trainer.hf_io.content_digest import content_digest
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf
from moerl.trainer.hf_io.hf_shards import HfShards, RankGroup, every_rank
from moerl.trainer.hf_io.teacher_folder import factors_digest, publish_teacher
from moerl.trainer.model.gpt import Model
from moerl.trainer.model.parallel import Parallel
from moerl.weight_sync.snapshot import WeightSnapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TeacherSource:
    """The trained model, and the folder that it began with."""

    model: Model
    path: Path


class TeacherWriter:
    """Writes this rank's part of each version that becomes a teacher; all calls are collective."""

    def __init__(
        self,
        config: Config,
        run: RunDir,
        source: TeacherSource,
        parallel: Parallel,
        tracer: Tracer,
        on_failure: Callable[[BaseException], None],
        patience: DiskPatience = DiskPatience(),
    ) -> None:
        """Write nothing yet.  on_failure: called in the thread; it ends the process."""
        self._config, self._run, self._source = config, run, source
        self._parallel, self._tracer = parallel, tracer
        self._on_failure, self._patience = on_failure, patience
        self._teachers = followers_of(config.algorithm)
        self._group = dist.new_group(backend="gloo", timeout=parallel.timeout)
        self._snapshot = WeightSnapshot()
        self._means: dict[str, dict[str, Tensor]] = {}  # of teachers with ema: fp32, by local name
        self._thread: threading.Thread | None = None
        self._step = -1  # that the thread writes
        self._write_s = 0.0  # of the last version

    def resume(self, begins: Sequence[PolicyVersion], step: int) -> None:
        """Take up the means after `step` optimizer steps.  begins: as in `version_at`.

        Raises TrainerError when a version that later steps want is missing.
        """
        for name, teacher in self._teachers.items():
            newest = step // teacher.every * teacher.every
            wanted = range(teacher_step(teacher, step), newest + 1, teacher.every)
            there = [s for s in wanted if self._is_there(name, version_at(begins, s))]
            missing = [s for s in wanted if s not in there and s != step]
            before = newest - teacher.every
            if teacher.ema and newest and newest not in there:
                missing += [] if self._is_there(name, version_at(begins, before)) else [before]
            if missing:
                lost = version_at(begins, missing[0])
                raise TrainerError(
                    f"teacher {name}: version {lost} is not in {self._run.teachers / name}; resume "
                    "from a checkpoint whose teachers are there, or train again: --from-start"
                )
            if teacher.ema:
                last = version_at(begins, newest if newest in there else before)
                self._means[name] = self._read_mean(teacher_folder(self._run, name, last))

    def publish(self, begins: Sequence[PolicyVersion], step: int) -> None:
        """Copy the weights after `step` steps and begin to write them, for the teachers that take
        this version.  Waits for the version before."""
        version = version_at(begins, step)
        due = {
            name: teacher
            for name, teacher in self._teachers.items()
            if step % teacher.every == 0 and not self._is_there(name, version)
        }
        if not due:
            return
        self.wait()
        self._step = step
        self._snapshot.store(self._live(), version)
        self._thread = threading.Thread(
            target=self._write, args=(due, tuple(begins), version), name="teachers", daemon=True
        )
        self._thread.start()

    def before_update(self) -> None:
        """Call before the weights change: that waits for their copy, no thread does."""
        self._snapshot.before_write()

    def wait(self, before: int | None = None) -> None:
        """Until nothing is being written; before: or only a version of this step or a later one."""
        if self._thread is not None and (before is None or self._step < before):
            self._thread.join()
            self._thread = None

    def metrics(self, teachers: Mapping[str, PolicyVersion], step: int) -> dict[str, float]:
        """Of the teachers of a step."""
        found = {"teacher/write_s": self._write_s}
        for name, version in teachers.items():
            found[f"teacher/{name}/version"] = float(version.step)
            found[f"teacher/{name}/lag"] = float(step - version.step)
            found[f"teacher/{name}/swaps"] = float(version.step // self._teachers[name].every)
        return found

    # --- the thread ------------------------------------------------------------------------------
    def _write(
        self,
        due: Mapping[str, TeacherConfig],
        begins: Sequence[PolicyVersion],
        version: PolicyVersion,
    ) -> None:
        begin = time.time()
        try:
            self._snapshot.wait()
            for name, teacher in due.items():
                self._write_one(name, teacher, version)
            if self._parallel.is_first:
                self._remove_old(begins, version.step)
        except BaseException as error:
            self._on_failure(error)
            raise
        self._write_s = time.time() - begin
        self._tracer.add("write teachers", begin, time.time(), version=str(version))

    @torch.no_grad()
    def _write_one(self, name: str, teacher: TeacherConfig, version: PolicyVersion) -> None:
        """The version, or the mean of the versions, as a folder that appears whole."""
        own = {local: self._snapshot[local] for local in self._live()}
        tensors = self._mean(name, teacher, own) if teacher.ema else own
        loaded = {local: tensor.to(own[local].dtype) for local, tensor in tensors.items()}
        folder = teacher_folder(self._run, name, version)
        fresh = folder.with_name(f".{folder.name}")
        model, lora, sizes = self._source.model, self._config.lora, self._parallel.sizes
        if model.adapters:
            digest = factors_digest(loaded, model.spec, lora, sizes, self._group)
            whole = gather_factors(tensors, model.spec, lora, sizes, self._group)
            if whole is not None:
                save_adapter(fresh, whole, model.spec, lora, str(self._source.path))
        else:
            digest = content_digest(loaded, model.tiles, hf_shapes(model.spec), self._group)
            held = every_rank(model.spec, sizes, self._parallel.platform.layers)
            ranks = RankGroup(self._parallel.rank, self._group)
            HfShards(lambda: tensors, held, ranks, self._source.path).save(fresh, self._patience)
        if self._parallel.is_first:
            shutil.rmtree(folder, ignore_errors=True)
            publish_teacher(fresh, folder, digest)
            log.info("teacher %s: version %s, digest %s", name, version, digest)
        dist.barrier(self._group)  # the others' `wait` ends when the folder is there

    def _mean(
        self, name: str, teacher: TeacherConfig, own: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        if name not in self._means:
            self._means[name] = {local: tensor.float().clone() for local, tensor in own.items()}
            return self._means[name]
        for local, mean in self._means[name].items():
            mean.mul_(teacher.ema).add_(own[local].float(), alpha=1.0 - teacher.ema)
        return self._means[name]

    def _remove_old(self, begins: Sequence[PolicyVersion], step: int) -> None:
        """Remove versions that are wanted by no step from the oldest checkpoint on."""
        saved = [found for found, _ in self._run.finished_checkpoints()]
        first = min([*saved, max(0, step - 2)])
        for name, teacher in self._teachers.items():
            oldest = max(0, teacher_step(teacher, first) - teacher.every)
            kept = {str(version_at(begins, s)) for s in range(oldest, step + 1, teacher.every)}
            for folder in (self._run.teachers / name).iterdir():
                if folder.name not in kept and not folder.name.startswith("."):
                    shutil.rmtree(folder, ignore_errors=True)

    # --- state -----------------------------------------------------------------------------------
    def _live(self) -> dict[str, Tensor]:
        model = self._source.model
        return model.factors() if model.adapters else model.tensors

    def _is_there(self, name: str, version: PolicyVersion) -> bool:
        """As the first rank sees it."""
        there = self._parallel.is_first and teacher_folder(self._run, name, version).is_dir()
        return broadcast_value(there, bool, self._parallel.control)

    def _read_mean(self, folder: Path) -> dict[str, Tensor]:
        model = self._source.model
        mean = {
            local: torch.empty(tensor.shape, dtype=torch.float32)
            for local, tensor in self._live().items()
        }
        if model.adapters:
            return mean | model.parts_of(load_adapter(folder, model.spec, self._config.lora))
        load_hf(mean, model.tiles, HfFolder(folder))
        return mean
