"""Which weights an adapter belongs to, and the factors with which a run begins (`lora.start`).

A folder that moerl wrote names the files of its W0 by their fingerprint.  On other weights the
factors would load and mean something else.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from moerl.config.lora_settings import LoraConfig
from moerl.config.resume import fingerprint
from moerl.core.errors import ModelError
from moerl.core.json_files import read_json
from moerl.trainer.hf_io.adapter_files import load_adapter
from moerl.trainer.hf_io.hf_folder import HfFolder
from moerl.trainer.hf_io.hf_save import write_json

_FILE = "base.json"


def note_base(folder: Path, base: Path) -> None:
    """Write which W0 the adapter in `folder` belongs to."""
    write_json(folder / _FILE, {"model": str(base), "fingerprint": fingerprint(base)})


def check_base(folder: Path, base: Path) -> None:
    """Raises ModelError where the adapter names other weights; folders of others name none."""
    if not (folder / _FILE).is_file():
        return
    noted, found = read_json(folder / _FILE), fingerprint(base)
    if noted["fingerprint"] != found:
        raise ModelError(
            f"{folder}: it belongs to weights with the fingerprint {noted['fingerprint']} "
            f"({noted['model']}), {base} has {found}"
        )


def start_factors(lora: LoraConfig, source: HfFolder) -> dict[str, Tensor]:
    """Whole factors of `lora.start`.  source: W0.  Raises ModelError."""
    folder = Path(lora.start)
    check_base(folder, source.path)
    return load_adapter(folder, source.spec, lora)
