"""The adapters of a checkpoint as a folder of peft, for `checkpoint.start`.

python -m moerl.trainer.checkpoints.start_adapter CHECKPOINT OUT --model W0
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from moerl.config.lora_settings import LoraConfig
from moerl.config.resume import fingerprint
from moerl.core.errors import ModelError, MoerlError
from moerl.layout.tiles import full_box
from moerl.runtime.run_dir import read_manifest, torn_checkpoint
from moerl.trainer.checkpoints.torch_dist_files import TorchDistFiles
from moerl.trainer.hf_io.adapter_files import note_base, save_adapter
from moerl.trainer.hf_io.hf_folder import HfFolder

_PREFIX = "lora."  # of the factors' names in a checkpoint


def write_start_adapter(checkpoint: Path, out: Path, base: Path) -> None:
    """Write the folder.  Raises ModelError for a damaged checkpoint, or another W0."""
    manifest = read_manifest(checkpoint)
    if cause := torn_checkpoint(checkpoint):
        raise ModelError(f"{checkpoint}: damaged: {cause}")
    if (found := fingerprint(base)) != manifest["base"]:
        raise ModelError(
            f"{checkpoint}: its adapters belong to weights with the fingerprint "
            f"{manifest['base']}, {base} has {found}; set model.path to their folder"
        )
    lora = LoraConfig(**manifest["lora"])
    save_adapter(out, _factors(checkpoint), HfFolder(base).spec, lora, str(base))
    note_base(out, base)


def _factors(checkpoint: Path) -> dict[str, Tensor]:
    files = TorchDistFiles(checkpoint)
    factors = {}
    for name in files.names:
        if name.startswith(_PREFIX):
            shape = files.shape(name)
            value = torch.empty(shape, dtype=files.dtype(name))
            files.read_into(value, name, full_box(shape))
            factors[name.removeprefix(_PREFIX)] = value
    return factors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    args = parser.parse_args()
    try:
        write_start_adapter(args.checkpoint, args.out, args.model)
    except MoerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
