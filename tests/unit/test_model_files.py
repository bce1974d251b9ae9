"""A model folder gets every small file of its source, or the names of the others are said."""

from __future__ import annotations

from pathlib import Path

import pytest

from moerl.trainer.hf_io import hf_save
from moerl.trainer.hf_io.hf_save import copy_small_files


def test_small_files_are_copied_and_others_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_save, "SMALL_BYTES", 100)
    source, target = tmp_path / "source", tmp_path / "target"
    copied = {
        *("LICENSE", "README.md", "preprocessor_config.json", "tokenizer.json", "vocab.txt"),
        *("chat_template.jinja", "generation_config.json", "modeling_own.py"),
    }
    anew = {"config.json", "model.safetensors", "model.safetensors.index.json", "a.bin", ".hidden"}
    left_out = {"adapter_config.json", "hf_quant_config.json", "large.dat"}
    for folder in (source / "onnx", source / "additional_chat_templates", target):
        folder.mkdir(parents=True)
    for name in copied | anew | left_out:
        (source / name).write_text(name)
    (source / "large.dat").write_text("x" * 101)
    (source / "additional_chat_templates" / "tools.jinja").write_text("t")
    (source / "link.txt").symlink_to(source / "LICENSE")
    assert set(copy_small_files(source, target)) == left_out | {"onnx/"}
    names = {path.name for path in target.iterdir()}
    assert names == copied | {"link.txt", "additional_chat_templates"}
    assert (target / "LICENSE").read_text() == "LICENSE"
    assert not (target / "link.txt").is_symlink()
    assert (target / "additional_chat_templates" / "tools.jinja").exists()
