"""Checkpoints written while training continues: copy the state, write it in a thread, rename last.

`save` stops training only while the state is planned and copied to buffers in host memory, which
are kept between checkpoints.  A thread of each rank then writes its own file; rank 0's joins the
results, writes the manifest last and renames the folder.  At most one checkpoint is in flight.  A
crash or a failed write leaves a hidden folder, which the next writer removes, and older checkpoints
unchanged; failed writes are counted and logged.  On a full disk the copy is written again until
there is room; the next checkpoint waits for it, and after the limit the run ends.

The state of an offloaded optimizer is in host memory and would not fit twice: it is written from
there, one tensor at a time, and the next update waits until it is on the disk.

Megatron's own writers fork the trainer, with its sockets, threads and CUDA context, and pass
results through a manager process; torch's need a process group that training uses as well.  So this
one has a thread and its own gloo group.

Idea of the split in plan, copy and finalisation: megatron-core's and torch's asynchronous
checkpointing.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from torch import Tensor
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo, _write_item
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from moerl.config.schema import CheckpointConfig
from moerl.core.atomic import atomic_write
from moerl.core.errors import NonRetryableError, cause_of
from moerl.distributed.object_collectives import all_gather_values, broadcast_value
from moerl.runtime import disk_wait
from moerl.runtime.disk_wait import DiskPatience, DiskWait
from moerl.runtime.run_dir import RunDir
from moerl.runtime.trace import Tracer
from moerl.trainer.checkpoints.checkpoint_files import SummedStream, Sums
from moerl.trainer.checkpoints.checkpoint_store import CheckpointStore
from moerl.trainer.checkpoints.optimizer_shards import FORM
from moerl.trainer.model.parallel import Parallel
from moerl.weight_sync.transports.pinned_memory import host_tensors

log = logging.getLogger(__name__)

BACKEND, FORMAT = "torch_dist", 1
METADATA = {  # the optimizer state is cut independently of the layout; megatron adds to copies
    "distrib_optim_sharding_type": FORM,
    "chained_optim_avoid_prefix": True,
}


class CheckpointWriter:
    """Writes the checkpoints of one trainer; every rank has one, all calls are collective."""

    def __init__(
        self,
        run: RunDir,
        config: CheckpointConfig,
        parallel: Parallel,
        tracer: Tracer,
        incarnation: int,
        patience: DiskPatience = DiskPatience(),
    ) -> None:
        """Write nothing yet.

        incarnation: of this trainer; a replaced trainer publishes no checkpoint.  patience: for
        room on the disk; its `tell` is called in another thread.
        """
        self._patience = patience
        self._store = CheckpointStore(run, config, incarnation)
        self._parallel, self._tracer = parallel, tracer
        self._group = dist.new_group(backend="gloo", timeout=parallel.timeout)
        self._buffers: dict[MetadataIndex, Tensor] = {}
        self._holds_update = False  # the state that is being written is not a copy
        self._thread: threading.Thread | None = None
        self._ended: dict[str, float] = {}  # metrics of the last finished write
        self._error = ""  # error of that write
        self._found_no_room = False  # it waited for room until the limit
        self._failed = 0
        self._plan: _Plan | None = None  # of the last checkpoint
        if parallel.is_first:
            self._store.clean()

    def save(
        self,
        step: int,
        state: dict[str, Any],
        manifest: Mapping[str, Any],
        *,
        is_offloaded: bool = False,
    ) -> None:
        """Copy `state` (Megatron's sharded form) and start to write it; it may change afterwards.

        manifest: readable without torch (`moerl.runtime.run_dir.read_manifest`).  is_offloaded: the
        optimizer's state is in host memory; it may change after `before_update`.  Waits for the
        previous checkpoint.  Raises NonRetryableError when that write found no room.
        """
        self.wait()
        if self._found_no_room:
            raise NonRetryableError(f"a checkpoint was not written: {self._error}")
        begin, hidden = time.time(), self._store.hidden(step)
        failed = self._make_folder(step)
        dist.barrier(self._group)
        self._holds_update = is_offloaded
        strategy = _StateCopy(self._group, self._buffers, self._plan, self._parallel.device.type)
        self._plan = strategy.copy_from(state, hidden)
        copied = time.time()
        self._tracer.add("checkpoint copy", begin, copied, step=step)
        self._thread = threading.Thread(
            target=self._write,
            args=(step, strategy, dict(manifest), copied - begin, failed),
            name="checkpoint",
            daemon=True,  # a rank that dies does not wait for it
        )
        self._thread.start()

    def _make_folder(self, step: int) -> str:
        """Make the hidden folder, on the first rank; why that failed, or an empty string.

        The other ranks learn it when the write ends.
        """
        if self._parallel.is_first:
            hidden = self._store.hidden(step)
            try:
                shutil.rmtree(hidden, ignore_errors=True)
                hidden.mkdir(parents=True)
            except OSError as error:
                return cause_of(error)
        return ""

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def before_update(self) -> None:
        """Call before the optimizer's state changes: waits while it is written from its own memory.

        The wait counts as pause of that checkpoint.
        """
        if not self._holds_update:
            return
        begin = time.time()
        self.wait()
        self._holds_update = False
        if self._ended:
            self._ended["checkpoint/pause_s"] += time.time() - begin

    def metrics(self) -> dict[str, float]:
        """Metrics of the last finished checkpoint, returned once; empty during a write."""
        if self._thread is not None and self._thread.is_alive():
            return {}
        ended, self._ended = self._ended, {}
        return ended

    def finish(self) -> None:
        """Wait; raises NonRetryableError when the last checkpoint could not be written."""
        self.wait()
        if self._parallel.is_first:
            self._store.rank()
        if self._error:
            raise NonRetryableError(f"the last checkpoint was not written: {self._error}")

    def _write(
        self, step: int, strategy: _StateCopy, manifest: dict[str, Any], pause: float, failed: str
    ) -> None:
        """Write and publish in the background.  failed: why the folder is missing, or ""."""
        begin, wait = time.time(), self._patience.begin(f"the checkpoint of step {step}")
        while True:
            results = failed or self._write_part(step, strategy)
            try:
                verdict = self._commit(step, strategy, manifest, results, wait)
            except Exception as error:  # a peer is gone: the trainer ends, older checkpoints stay
                log.exception("the checkpoint of step %d", step)
                verdict = _Verdict(cause_of(error))
            if not verdict.again:
                break
            failed = ""
        self._error = verdict.cause
        self._found_no_room = verdict.is_full and self._patience.limit_s > 0
        end = time.time()
        self._tracer.add("checkpoint write", begin, end, step=step)
        self._failed += bool(self._error)
        self._ended = {
            "checkpoint/pause_s": pause,
            "checkpoint/write_s": end - begin,
            "checkpoint/failed": float(self._failed),
        }
        if self._error:
            self._say(f"the checkpoint of step {step} was not written: {self._error}")

    def _say(self, text: str) -> None:
        log.error("%s", text)
        if self._parallel.is_first:
            self._patience.tell(text)

    def _write_part(self, step: int, strategy: _StateCopy) -> list[WriteResult] | str:
        """Write this rank's file; why it could not, as text."""
        try:
            return strategy.writer.write()
        except Exception as error:  # torch wraps the error of a full disk in types of its own
            log.exception("the checkpoint of step %d", step)
            return cause_of(error)

    def _commit(
        self,
        step: int,
        strategy: _StateCopy,
        manifest: dict[str, Any],
        results: list[WriteResult] | str,
        wait: DiskWait,
    ) -> _Verdict:
        """Join the files of all ranks; the first rank decides whether all write again."""
        outcome = (
            (results, []) if isinstance(results, str) else ("", list(map(_WrittenItem.of, results)))
        )
        mine = (*outcome, strategy.writer.sums, strategy.writer.num_bytes)
        every = all_gather_values(mine, tuple[str, list[_WrittenItem], Sums, int], self._group)
        cause = next((cause for cause, *_ in every if cause), "")
        verdict = _Verdict(cause)
        if self._parallel.is_first:
            try:
                if not cause:
                    assert strategy.metadata is not None, "rank 0 has the plan of all"
                    common = self._store.hidden(step) / COMMON_STATE_FNAME
                    atomic_write(common, strategy.common, sync=True)
                    strategy.writer.finish(
                        strategy.metadata,
                        [[item.result() for item in items] for _, items, *_ in every],
                    )
                    hidden = str(self._store.hidden(step))
                    save_config(CheckpointingConfig(BACKEND, FORMAT), hidden)
                    known = {n: found for _, _, sums, _ in every for n, found in sums.items()}
                    self._store.publish(step, manifest, known)
            except Exception as error:  # on any error: the other ranks wait for the result
                log.exception("the checkpoint of step %d", step)
                cause = cause_of(error)
            verdict = self._judge(step, cause, sum(size for *_, size in every), wait)
        return broadcast_value(verdict, _Verdict, self._group)

    def _judge(self, step: int, cause: str, wanted: int, wait: DiskWait) -> _Verdict:
        """Remove a failed checkpoint; on a full disk, wait for `wanted` bytes and retry."""
        if not cause:
            wait.done()
            return _Verdict()
        shutil.rmtree(self._store.hidden(step), ignore_errors=True)
        target = self._store.run.checkpoint(step)
        if not disk_wait.is_full(cause, target, wanted):
            return _Verdict(cause)
        again = wait.for_room(target, wanted, cause)
        if again:
            self._make_folder(step)
        cause = f"{disk_wait.shortage(target, wanted)} ({cause})"
        return _Verdict(cause, is_full=True, again=again)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """End of one attempt, equal on all ranks."""

    cause: str = ""  # why no checkpoint was made
    is_full: bool = False  # for want of room
    again: bool = False  # all ranks write again


@dataclass(frozen=True, slots=True)
class _WrittenItem:
    """torch's WriteResult for other ranks."""

    name: str
    offset: tuple[int, ...] | None
    index: int | None
    num_bytes: int
    file: str
    start: int  # in the file
    length: int

    @classmethod
    def of(cls, result: WriteResult) -> _WrittenItem:
        at, place = result.index, result.storage_data
        assert not place.transform_descriptors, "files are written as they are"
        offset = None if at.offset is None else tuple(at.offset)
        size = result.size_in_bytes
        return cls(at.fqn, offset, at.index, size, place.relative_path, place.offset, place.length)

    def result(self) -> WriteResult:
        offset = None if self.offset is None else torch.Size(self.offset)
        index = MetadataIndex(self.name, offset, self.index)
        return WriteResult(index, self.num_bytes, _StorageInfo(self.file, self.start, self.length))


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where the parts of a state are written.  All checkpoints of a trainer have one plan: rank 0
    joins and checks the plans of all ranks in time that grows with the square of a tensor's parts.
    """

    local: SavePlan
    central: SavePlan
    metadata: Metadata | None  # of all ranks, on rank 0


class _StateCopy(TorchDistSaveShardedStrategy):  # type: ignore[misc]  # untyped
    """Megatron's strategy with our writer: plans over our group and copies, without writing."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        buffers: dict[MetadataIndex, Tensor],
        previous: _Plan | None,
        device: str,
    ) -> None:
        super().__init__(BACKEND, FORMAT, thread_count=1)
        self._device = device
        self._group, self._buffers, self._known = group, buffers, previous
        self.metadata: Metadata | None = None  # metadata of all ranks, on rank 0
        self.common = b""  # state without model tensors, as torch.save writes it, on rank 0
        self.writer: _Writer

    def copy_from(self, state: dict[str, Any], folder: Path) -> _Plan:
        """Take the steps of `dist_checkpointing.save` before its first write.

        That write, of the common part, would make the other ranks wait for rank 0, and its check
        would gather descriptions of all tensors over the default group, on the device.
        """
        state["content_metadata"] = dict(METADATA)
        sharded, common = save_preprocess(state, False)
        if dist.get_rank(self._group) == 0:
            stream = io.BytesIO()
            torch.save(common, stream)
            self.common = stream.getvalue()
        parts, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded, self.keep_only_main_replica
        )
        source = mcore_to_pyt_state_dict(parts, False)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        planner.set_up_planner(source)
        known = self._known if self._is_known(planner.create_local_plan()) else None
        if known is None:
            validate_sharding_integrity(determine_global_metadata(sharded, self._group)[1])
        self.writer = _Writer(str(folder), self._buffers, self._device)
        (_, metadata, _), central, local, *_ = save_state_dict_async_plan(
            source,
            self.writer,
            self._group,
            0,
            planner=planner,
            cached_ckpt_structure=(known.central, known.local, True) if known else None,
        )
        plan = known or _Plan(local, central, metadata)
        self.metadata = plan.metadata
        return plan

    def _is_known(self, local: SavePlan) -> bool:
        """Whether every rank has its plan of the last checkpoint."""
        is_same = self._known is not None and self._known.local.items == local.items
        return all(all_gather_values(is_same, bool, self._group))


class _Writer(FileSystemWriterAsync):  # type: ignore[misc]  # untyped
    """Copies its rank's part, and writes it to one file when `write` is called."""

    def __init__(self, folder: Any, buffers: dict[MetadataIndex, Tensor], device: str) -> None:
        super().__init__(folder, thread_count=1)
        self._buffers, self._device = buffers, device
        self._copied: list[tuple[WriteItem, Any]] = []
        self._name = ""
        self.sums: Sums = {}  # of the file that `write` wrote
        self.num_bytes = 0  # of all tensors

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan unchanged: the folder exists, or its disk is full."""
        return plan

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Take the copy: objects are pickled, tensors of the device are copied to host buffers.

        A GPU's trainer has tensors in host memory where its optimizer is offloaded, or where they
        were made for this checkpoint.
        """
        self._name = f"{plan.storage_data.prefix}0.distcp"
        found = [(item, planner.resolve_data(item)) for item in plan.items]
        tensors = {item.index: data.detach() for item, data in found if isinstance(data, Tensor)}
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        live = {i: tensor for i, tensor in tensors.items() if tensor.device.type == self._device}
        self._fit(live)
        for index, tensor in live.items():
            self._buffers[index].copy_(tensor, non_blocking=True)
        held = tensors | self._buffers
        self._copied = [(item, held.get(item.index, data)) for item, data in found]
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies to pinned memory are asynchronous

    def _fit(self, live: Mapping[MetadataIndex, Tensor]) -> None:
        """Have a buffer for each tensor: buffers of the last checkpoint, or new for a new state."""
        if _form(self._buffers) != _form(live):
            self._buffers.clear()  # first: both would not fit
            self._buffers.update(zip(live, host_tensors(list(live.values())), strict=True))

    def write(self) -> list[WriteResult]:
        """Write the copy.  Raises OSError, for a full disk for example."""
        if not self._copied:
            return []
        path = Path(self.checkpoint_dir) / self._name
        with path.open("wb") as stream:
            summed: Any = SummedStream(stream)  # torch calls `write`, `tell` and `flush` only
            results = [
                _write_item(
                    self.transforms,
                    summed,
                    _alone(data),
                    item,
                    self._name,
                    SerializationFormat.TORCH_SAVE,
                )
                for item, data in self._copied
            ]
            stream.flush()
            os.fsync(stream.fileno())
        self.sums = {self._name: summed.sum()}
        return results


def _alone(data: Any) -> Any:
    """The tensor with a storage of its own size: torch saves the whole storage."""
    if isinstance(data, Tensor) and data.untyped_storage().nbytes() > data.nbytes:
        return data.clone()
    return data


def _form(
    tensors: Mapping[MetadataIndex, Tensor],
) -> dict[MetadataIndex, tuple[torch.Size, torch.dtype]]:
    return {index: (tensor.shape, tensor.dtype) for index, tensor in tensors.items()}
