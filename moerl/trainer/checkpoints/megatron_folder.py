"""A Megatron checkpoint in Hugging Face coordinates: of a run, of Megatron-LM or of its bridges.

The model's config.json is read from the checkpoint, from the model folder of its run, or from a
folder that is named.  Optimizer state and a critic are ignored; any other tensor must belong to
the model of that config.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moerl.core.errors import LayoutError, ModelError
from moerl.core.json_files import read_json
from moerl.layout import Box, ModelSpec, Tile, at, hf_shapes, model_spec
from moerl.layout.tiles import full_box, hf_box, local_box, meet, num_elements
from moerl.runtime.run_dir import read_manifest, torn_checkpoint
from moerl.trainer.checkpoints.checkpoint_files import MANIFEST
from moerl.trainer.checkpoints.find_checkpoint import find_checkpoint, model_of
from moerl.trainer.checkpoints.stored_names import (
    PADDED,
    SPLIT_PARTS,
    ModelTensor,
    StoredKey,
    model_tensors,
)
from moerl.trainer.checkpoints.torch_dist_files import TorchDistFiles
from moerl.trainer.hf_io.hf_folder import HfFolder

_MODEL = re.compile(r"(embedding|decoder|output_layer|mtp)\.")


class _Source(NamedTuple):
    """A piece of a Hugging Face tensor: its tile on a stored tensor."""

    key: str
    tile: Tile


class MegatronFolder:
    """A `torch_dist` checkpoint, read by Hugging Face name and box.

    model: folder with config.json and tokenizer, and with the prediction layers where the
    checkpoint holds none; None: see `model_of`.  Raises ModelError for a folder without a whole
    checkpoint, and when it is not of the model: a tensor that is missing, unknown or of another
    shape.
    """

    def __init__(self, path: str | Path, model: str | Path | None = None) -> None:
        self.path = find_checkpoint(Path(path))
        self.model = model_of(self.path) if model is None else Path(model)
        if self.summed_files and (cause := torn_checkpoint(self.path)):
            raise ModelError(f"{self.path}: damaged: {cause}")
        self.config: dict[str, Any] = read_json(self.model / "config.json")
        self._files = TorchDistFiles(self.path)
        try:
            self.spec = model_spec(self.config)
        except LayoutError as error:
            raise ModelError(f"{self.model}: {error}") from error
        self._shapes = hf_shapes(self.spec)
        self._sources: dict[str, list[_Source]] = defaultdict(list)
        self._add_tensors()
        rest = self._shapes.keys() - self._sources.keys()
        self._untrained = HfFolder(self.model) if rest else None

    @property
    def summed_files(self) -> list[str]:
        """Files whose digests the manifest has; folders of Megatron-LM have no manifest."""
        has_manifest = (self.path / MANIFEST).exists()
        return sorted(read_manifest(self.path)["files"]) if has_manifest else []

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the stored tensor."""
        if name not in self._sources and self._untrained is not None:
            return self._untrained.dtype(name)
        return self._files.dtype(self._sources[name][0].key)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """One tensor, or a box of it."""
        if name not in self._shapes:
            raise ModelError(f"{self.path}: has no tensor {name}")
        if name not in self._sources and self._untrained is not None:
            return self._untrained.read(name, box)
        box = box if box is not None else full_box(self._shapes[name])
        wanted = Tile(name, box, full_box(tuple(map(len, box))))
        whole = torch.empty(tuple(map(len, box)), dtype=self.dtype(name))
        covered = 0
        for key, tile in self._sources[name]:
            part = meet(tile.hf_box, box)
            if part is None:
                continue
            covered += num_elements(part)
            place = local_box(tile, part)
            piece = whole[at(local_box(wanted, part))]
            # entries of a layer or expert dim are dims of extent 1
            lead = len(place) - piece.ndim
            self._files.read_into(piece[(None,) * lead] if lead else piece, key, place)
        assert covered == num_elements(box), f"{name}: {covered} elements of {box}"
        return whole

    def _add_tensors(self) -> None:
        if any(key.startswith("lora.") for key in self._files.names):
            raise ModelError(
                f"{self.path}: it holds adapters alone; hf/ of its run has the merged weights, "
                "with checkpoint.hf = every from each checkpoint"
            )
        known: set[str] = set()
        for tensor in model_tensors(self._stored_spec()):
            for source in self._find(tensor):
                known.add(source.key)
                self._sources[source.tile.hf].append(source)
        for key in self._files.names:
            if _MODEL.match(key) and key not in known:
                raise ModelError(
                    f"{self.path}: {key} is not a tensor of the {self.spec.family} of "
                    f"{self.model / 'config.json'}; name the model of this checkpoint"
                )

    def _stored_spec(self) -> ModelSpec:
        """Without prediction layers where the checkpoint has none: moerl does not train them."""
        has_them = any(key.startswith("mtp.") for key in self._files.names)
        return self.spec if has_them else replace(self.spec, mtp_layers=0)

    def _find(self, tensor: ModelTensor) -> Iterator[_Source]:
        tried: dict[str, None] = {}
        for stored in tensor.candidates():
            tried[stored.key] = None
            keys = self._parts(stored.key)
            if keys and all(self._fits(key, stored) for key in keys):
                yield from self._pieces(tensor, stored, keys)
                return
        raise ModelError(
            f"{self.path}: tensor {' or '.join(tried)} is missing; "
            f"{self.model / 'config.json'} ({self.spec.family}) needs it"
        )

    def _parts(self, key: str) -> list[str]:
        """The tensor itself, or the parts in which it is stored."""
        if key in self._files:
            return [key]
        return [part for name in SPLIT_PARTS if (part := f"{key}.{name}") in self._files]

    def _fits(self, key: str, stored: StoredKey) -> bool:
        """Whether the tensor has the leading dims of this name."""
        lead = self._files.shape(key)[: len(stored.lead)]
        return len(lead) == len(stored.lead) and all(
            i < n for i, n in zip(stored.lead, lead, strict=True)
        )

    def _pieces(self, tensor: ModelTensor, stored: StoredKey, keys: Sequence[str]) -> list[_Source]:
        """The tiles of a tensor on the stored tensors, which follow each other along its rows."""
        lead, shape = len(stored.lead), tensor.tensor.shape
        entry = tuple(range(i, i + 1) for i in stored.lead)
        pieces, first = [], 0
        for key in keys:
            rows, *rest = self._files.shape(key)[lead:]
            held = (range(first, first + rows), *map(range, shape[1:]))
            if tuple(rest) != shape[1:]:
                self._refuse_shape(key, tensor)
            for tile in tensor.tensor.tiles:
                part = meet(tile.box, held)
                if part is not None:
                    inside = (range(part[0].start - first, part[0].stop - first), *part[1:])
                    hf = hf_box(tile, part)
                    pieces.append(_Source(key, Tile(tile.hf, hf, (*entry, *inside))))
            first += rows
        if first != shape[0] and not (stored.key in PADDED and first > shape[0]):
            self._refuse_shape(stored.key, tensor)
        return pieces

    def _refuse_shape(self, key: str, tensor: ModelTensor) -> None:
        found = self._files.shape(key) if key in self._files else "other rows"
        raise ModelError(
            f"{self.path}: {key} has shape {found}, {self.model / 'config.json'} "
            f"({self.spec.family}) says {tensor.tensor.shape}"
        )
