"""A saved language model as a part of the model that its config describes (Llama-4)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from moerl.layout import model_spec


def nest(folder: Path, config: dict[str, Any]) -> None:
    """Rename the tensors of a folder that transformers saved; nothing where names have no root."""
    file, root = folder / "model.safetensors", model_spec(config).root
    if root:
        tensors = {root + name: tensor for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
