"""The way back from a merged folder: what it was made of.

Rounding loses bits, so no subtraction gives W0 back.  A merge therefore keeps a copy of the adapter
in OUT/adapter, with the fingerprint of W0 and the dtype.  The way back is to find W0 by that
fingerprint and the factors in the copy, and to prove the pair: the merge of both must be the merged
folder, bit for bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from moerl.config.lora_settings import LoraConfig
from moerl.config.resume import fingerprint
from moerl.config.validate import read_section
from moerl.core.errors import ModelError
from moerl.core.json_files import read_json
from moerl.trainer.hf_io.hf_folder import HfFolder
from moerl.trainer.hf_io.hf_save import write_json

_COPY, _NOTE = "adapter", "merged.json"


def keep_parts(out: Path, parts: MergedFrom) -> None:
    """Copy the adapter into a merged folder, with what else the merge depended on."""
    base, adapter, dtype, lora = parts
    shutil.copytree(adapter, out / _COPY, dirs_exist_ok=True)
    note = {
        "model": str(base),
        "fingerprint": fingerprint(base),
        "dtype": str(dtype).removeprefix("torch."),
        "lora": None if lora is None else asdict(lora),
    }
    write_json(out / _COPY / _NOTE, note)


class MergedFrom(NamedTuple):
    """What a folder was merged from."""

    base: Path  # folder of W0
    adapter: Path
    dtype: torch.dtype
    lora: LoraConfig | None  # None: of an adapter from elsewhere


def read_parts(merged: Path, base: Path | None) -> MergedFrom:
    """base: where W0 is now; None: where it was.  Raises ModelError."""
    copy = merged / _COPY
    if not (copy / _NOTE).is_file():
        raise ModelError(f"{merged}: it keeps no adapter, so its base and factors are not known")
    note = read_json(copy / _NOTE)
    base = base or Path(note["model"])
    if (found := fingerprint(base)) != note["fingerprint"]:
        raise ModelError(
            f"{merged}: it was merged from weights with the fingerprint {note['fingerprint']} "
            f"({note['model']}), {base} has {found}; name their folder with --base"
        )
    lora = None if note["lora"] is None else read_section(LoraConfig, note["lora"])
    return MergedFrom(base, copy, getattr(torch, note["dtype"]), lora)


def give_back(adapter: Path, out: Path) -> None:
    """Copy the kept adapter to `out`, as the folder that was merged."""
    if out.exists():
        raise ModelError(f"{out}: it exists; choose another folder")
    shutil.copytree(adapter, out, ignore=shutil.ignore_patterns(_NOTE))


def check_equal(merged: Path, wanted: Mapping[str, torch.Tensor]) -> None:
    """Raises ModelError, naming a tensor of the folder that is another one."""
    source = HfFolder(merged)
    for name, tensor in wanted.items():
        found = source.read(name)
        same = found.dtype == tensor.dtype and torch.equal(_bits(found), _bits(tensor))
        if not same:
            raise ModelError(
                f"{merged}: {name} is not W0 + s B A of its adapter: the folder was changed after "
                "it was merged"
            )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
