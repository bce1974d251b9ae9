"""The parameters of all ranks -> a Hugging Face folder, each of its files written by one rank.

A file is written by the rank that holds most of it, so stages and expert ranks write side by side;
other ranks send the parts that it lacks.  Tensors travel in buckets of BUCKET_BYTES, one message
per source, and are dropped when they are written: no rank holds the model.  All ranks take the
buckets in the same order, so blocking messages cannot wait for each other in a circle.  Everything
is written to a sibling folder and moved to the target at the end, so a killed save leaves no folder
that looks complete.
Rejected: one message per tensor (thousands of small sends).
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moerl.config.schema import ParallelConfig
from moerl.core.errors import LayoutError, ModelError, NonRetryableError, cause_of
from moerl.core.json_files import read_json
from moerl.distributed.object_collectives import all_gather_values, broadcast_value
from moerl.layout import (
    Box,
    LayerSpec,
    ModelSpec,
    Named,
    Op,
    at,
    check_covers,
    hf_shapes,
    hf_tiles,
    join,
    megatron_tiles,
    model_spec,
    num_elements,
)
from moerl.runtime import disk_wait
from moerl.runtime.disk_wait import DiskPatience, DiskWait
from moerl.trainer.hf_io.hf_folder import HfFolder
from moerl.trainer.hf_io.hf_save import (
    assemble,
    copy_small_files,
    file_form,
    replace_folder,
    saved_config,
    shard_names,
    write_index,
    write_json,
)
from moerl.trainer.hf_io.safetensors_files import Planned, memory, safetensors_header

BUCKET_BYTES = 64 * 2**20
SHARD_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class RankGroup:
    """This rank's place among the ranks that save; group ranks are numbered as in the layout.

    group: of gloo; None with one rank.
    """

    rank: int
    group: dist.ProcessGroup | None


class HfShards:
    """Saves the live parameters of all ranks as model folders.

    params: returns this rank's live parameters by local name, called at every save.
    tiles: the shards of every rank.  source: the model folder that training began with; it gives
    config, tokenizer, and the tensors that no rank holds (prediction layers).  config: in place of
    the source's.
    Construction and `save` are collective.  Raises LayoutError when the live parameters do
    not match `tiles`, ModelError when they do not match the source's config.
    """

    def __init__(
        self,
        params: Callable[[], Mapping[str, Tensor]],
        tiles: Mapping[int, Named],
        ranks: RankGroup,
        source: str | Path,
        *,
        max_shard_bytes: int = SHARD_BYTES,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._params, self._tiles, self._ranks = params, tiles, ranks
        self._source = Path(source)
        self._config = read_json(self._source / "config.json") if config is None else config
        try:
            self._spec = model_spec(self._config)
        except LayoutError as error:
            raise ModelError(f"{source}: {error}") from error
        self._form, self._shapes = file_form(self._spec), hf_shapes(self._spec)
        live = params()
        check_covers(tiles[ranks.rank], {name: tuple(param.shape) for name, param in live.items()})
        self._held, self._whole = _held(tiles), hf_tiles(self._spec)
        if foreign := self._held.keys() - self._shapes.keys():
            raise ModelError(f"{min(foreign)} is not a tensor of the model of {source}")
        untrained = self._shapes.keys() - self._held.keys()
        self._untrained = HfFolder(self._source) if untrained else None
        self._local_dtypes = self._exchange({name: param.dtype for name, param in live.items()})
        self._dtypes = {name: self._dtype_of(name) for name in self._shapes}
        self._shards = shard_names(
            {name: self._planned(name).nbytes for name in self._form}, max_shard_bytes
        )
        self._writers = self._choose_writers()
        self._left_out: list[str] = []  # of the source, on rank 0

    @torch.no_grad()
    def save(self, folder: str | Path, patience: DiskPatience = DiskPatience()) -> None:
        """Write the folder, replacing a folder of the same name; collective.

        patience: for room on the disk.  Raises NonRetryableError on all ranks when a rank could not
        write.
        """
        target = Path(folder).absolute()
        wait = patience.begin(str(target))
        while verdict := self._attempt(target):
            again = self._ranks.rank == 0 and self._may_wait(target, verdict, wait)
            if not self._shared("again" if again else ""):
                raise NonRetryableError(f"{target} was not written: {verdict}")
        wait.done()
        if self._left_out:
            names = ", ".join(self._left_out)
            patience.tell(f"{target} has no copy of these files of {self._source}: {names}")

    def _may_wait(self, target: Path, cause: str, wait: DiskWait) -> bool:
        """Whether the folder, which is removed again, is worth another attempt: after a wait."""
        wanted = self._num_bytes()
        if not disk_wait.is_full(cause, target, wanted):
            return False
        return wait.for_room(target, wanted, cause)

    def _attempt(self, target: Path) -> str:
        """Write everything; why a rank could not, or an empty string, equal on all ranks."""
        fresh, verdict = self._begin(target)
        if not verdict:
            cause = self._write_all(fresh, self._params())
            every = [cause] if self._ranks.group is None else self._causes(cause)
            verdict = next(filter(None, every), "")
            if self._ranks.rank == 0 and not verdict:
                verdict = self._finish(target, fresh)
            verdict = self._shared(verdict)
        if verdict and self._ranks.rank == 0:
            shutil.rmtree(fresh, ignore_errors=True)
        return verdict

    def _num_bytes(self) -> int:
        """Of all tensors of the files."""
        return sum(self._planned(name).nbytes for name in self._form)

    # --- places of tensors -----------------------------------------------------------------------
    def _dtype_of(self, name: str) -> torch.dtype:
        if name not in self._held:
            assert self._untrained is not None, f"{name} is in the source"
            return self._untrained.dtype(name)
        found = {self._local_dtypes[rank][local_name] for rank, local_name, _ in self._held[name]}
        if len(found) > 1:
            kinds = " and ".join(sorted(map(str, found)))
            raise LayoutError(f"{name}: ranks hold it as {kinds}")
        return found.pop()

    def _planned(self, name: str) -> Planned:
        """A tensor of the files, without its content."""
        form = self._form[name]
        return Planned(name, form.shape, self._dtypes[next(iter(form.parts))], torch.Tensor)

    def _choose_writers(self) -> dict[str, int]:
        """File -> the rank that holds most of it; equals take turns."""
        writers: dict[str, int] = {}
        assigned: dict[int, int] = defaultdict(int)
        for file, names in self._shards.items():
            elements: dict[int, int] = defaultdict(int)
            for name in names:
                for part in self._form[name].parts:
                    for rank, _, size in self._held.get(part, ()):
                        elements[rank] += size
            writers[file] = min(elements or [0], key=lambda r: (-elements[r], assigned[r], r))
            assigned[writers[file]] += sum(self._planned(name).nbytes for name in names)
        return writers

    def _buckets(self, names: list[str]) -> Iterator[list[str]]:
        bucket: list[str] = []
        used = 0
        for name in names:
            size = self._planned(name).nbytes
            if bucket and used + size > BUCKET_BYTES:
                yield bucket
                bucket, used = [], 0
            bucket.append(name)
            used += size
        yield bucket

    def _ops(self, bucket: list[str], writer: int) -> dict[int, list[Op]]:
        """Rank -> its copies to the writer for a bucket, in an order that all ranks compute."""
        parts = dict.fromkeys(part for name in bucket for part in self._form[name].parts)
        held = [part for part in parts if part in self._held]
        sinks = {writer: {name: self._whole[name] for name in held}}
        sources: dict[int, Named] = defaultdict(dict)
        for part in held:
            for rank, local_name, _ in self._held[part]:
                sources[rank][local_name] = self._tiles[rank][local_name]
        by_rank: dict[int, list[Op]] = defaultdict(list)
        for op in join(sources, sinks, same_ranks=True):
            by_rank[op.src].append(op)
        return by_rank

    # --- writing ---------------------------------------------------------------------------------
    def _begin(self, target: Path) -> tuple[Path, str]:
        """The hidden folder, made by rank 0, and why it could not be made, on every rank."""
        fresh, cause = target.with_name(f".{target.name}.new-{os.getpid()}"), ""
        if self._ranks.rank == 0:
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                # a partial one can fill the disk
                for dead in target.parent.glob(f".{target.name}.new-*"):
                    shutil.rmtree(dead, ignore_errors=True)
                fresh.mkdir()
            except OSError as error:
                cause = cause_of(error)
        name, cause = self._shared(fresh.name), self._shared(cause)
        return target.with_name(name), cause

    def _write_all(self, fresh: Path, params: Mapping[str, Tensor]) -> str:
        """This rank's part in every file; why it could not write, or empty.

        A rank whose disk is full still takes its messages: the others wait for it.
        """
        failed = ""
        for file, names in self._shards.items():
            writer = self._writers[file]
            if writer != self._ranks.rank:
                for bucket in self._buckets(names):
                    self._send(self._ops(bucket, writer), writer, params)
                continue
            contents = self._contents(names, params)
            try:
                self._write_file(fresh / file, names, contents)
            except OSError as error:
                failed = failed or f"{file}: {cause_of(error)}"
                for _ in contents:
                    pass
        return failed

    def _write_file(self, path: Path, names: list[str], contents: Iterator[Tensor]) -> None:
        with path.open("wb") as stream:
            stream.write(safetensors_header([self._planned(name) for name in names]))
            for tensor in contents:
                stream.write(memory(tensor))
            stream.flush()
            os.fsync(stream.fileno())

    def _contents(self, names: list[str], params: Mapping[str, Tensor]) -> Iterator[Tensor]:
        """The tensors of a file that this rank writes, in order."""
        for bucket in self._buckets(names):
            whole = self._receive(self._ops(bucket, self._ranks.rank), params)
            for name in bucket:
                form = self._form[name]
                for part in form.parts.keys() - whole.keys():
                    assert self._untrained is not None, f"{part} is in the source"
                    whole[part] = self._untrained.read(part).to(self._dtypes[part])
                if form.stacks:
                    dtype = self._planned(name).dtype
                    yield assemble(form, dtype, _reader(whole))
                else:
                    yield whole[next(iter(form.parts))]

    def _receive(
        self, by_rank: Mapping[int, list[Op]], params: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Whole Hugging Face tensors, from this rank's own parameters and from messages."""
        names = {op.dst_name for ops in by_rank.values() for op in ops}
        whole = {n: torch.empty(self._shapes[n], dtype=self._dtypes[n]) for n in names}
        for op in by_rank.get(self._ranks.rank, ()):
            whole[op.dst_name][at(op.dst_box)] = params[op.src_name][at(op.src_box)].cpu()
        for src in sorted(by_rank.keys() - {self._ranks.rank}):
            for dtype, ops in self._messages(by_rank[src]):
                size = sum(num_elements(op.src_box) for op in ops)
                flat = torch.empty(size, dtype=dtype)
                dist.recv(flat.view(torch.uint8), group=self._ranks.group, group_src=src)
                for op, piece in _pieces(flat, ops):
                    whole[op.dst_name][at(op.dst_box)] = piece
        return whole

    def _send(
        self, by_rank: Mapping[int, list[Op]], writer: int, params: Mapping[str, Tensor]
    ) -> None:
        for dtype, ops in self._messages(by_rank.get(self._ranks.rank, [])):
            size = sum(num_elements(op.src_box) for op in ops)
            flat = torch.empty(size, dtype=dtype)
            for op, piece in _pieces(flat, ops):
                piece.copy_(params[op.src_name][at(op.src_box)])
            dist.send(flat.view(torch.uint8), group=self._ranks.group, group_dst=writer)

    def _messages(self, ops: list[Op]) -> list[tuple[torch.dtype, list[Op]]]:
        by_dtype: dict[torch.dtype, list[Op]] = defaultdict(list)
        for op in ops:
            by_dtype[self._dtypes[op.dst_name]].append(op)
        return sorted(by_dtype.items(), key=lambda item: str(item[0]))

    def _finish(self, target: Path, fresh: Path) -> str:
        try:
            self._left_out = copy_small_files(self._source, fresh)
            config = saved_config(self._config, self._spec, self._dtypes)
            write_json(fresh / "config.json", config)
            write_index(fresh, self._shards, self._num_bytes())
            replace_folder(target, fresh)
        except OSError as error:
            return cause_of(error)
        return ""

    # --- agreement -------------------------------------------------------------------------------
    def _shared(self, text: str) -> str:
        """Rank 0's text on every rank."""
        return text if self._ranks.group is None else broadcast_value(text, str, self._ranks.group)

    def _causes(self, own: str) -> list[str]:
        assert self._ranks.group is not None, "several ranks have one"
        return all_gather_values(own, str, self._ranks.group)

    def _exchange(self, mine: Mapping[str, torch.dtype]) -> list[dict[str, torch.dtype]]:
        """Dtypes of every rank's parameters: a writer must know how to read a message."""
        if self._ranks.group is None:
            return [dict(mine)]
        names = {name: str(dtype) for name, dtype in mine.items()}
        every = all_gather_values(names, dict[str, str], self._ranks.group)
        return [{name: _dtype(text) for name, text in part.items()} for part in every]


def every_rank(spec: ModelSpec, layout: ParallelConfig, layer_spec: LayerSpec) -> dict[int, Named]:
    """The shards of each rank of a trainer."""
    world = range(layout.world_size)
    return {rank: megatron_tiles(spec, layout, rank, layer_spec) for rank in world}


def _held(tiles: Mapping[int, Named]) -> dict[str, list[tuple[int, str, int]]]:
    """Hugging Face tensor -> (rank, local name, elements) of its parts on the ranks."""
    held: dict[str, list[tuple[int, str, int]]] = defaultdict(list)
    for rank, named in tiles.items():
        for local_name, local in named.items():
            sizes: dict[str, int] = defaultdict(int)
            for tile in local.tiles:
                sizes[tile.hf] += num_elements(tile.hf_box)
            for name, size in sizes.items():
                held[name].append((rank, local_name, size))
    return dict(held)


def _reader(whole: Mapping[str, Tensor]) -> Callable[[str, Box], Tensor]:
    return lambda name, box: whole[name][at(box)]


def _pieces(flat: Tensor, ops: Iterable[Op]) -> Iterator[tuple[Op, Tensor]]:
    """The part of a flat message that belongs to each op, in the shape of its boxes."""
    first = 0
    for op in ops:
        size = num_elements(op.src_box)
        yield op, flat[first : first + size].view([len(r) for r in op.src_box])
        first += size


def _dtype(text: str) -> torch.dtype:
    """The dtype that is printed as `text`, such as torch.bfloat16."""
    found = getattr(torch, text.removeprefix("torch."))
    assert isinstance(found, torch.dtype), text
    return found
