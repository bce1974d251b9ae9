"""Hugging Face `datasets` files from disk, and columns by other names.

`tests/data/hf_datasets` was written by datasets 5.2.0: seven rows saved in two shards, the same
shuffled and cut to five, one split of a DatasetDict, and the rows as parquet and JSON lines.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from moerl.config import load_config
from moerl.config.checks import check
from moerl.config.schema import TaskConfig
from moerl.core.errors import ConfigError
from moerl.data.prompt_files import PromptFiles
from moerl.data.tasks import PromptStream, load_tokenizer

DATA = Path(__file__).resolve().parents[1] / "data/hf_datasets"
ROWS = [json.loads(line) for line in (DATA / "rows.jsonl").read_text().splitlines()]
COLUMNS = {"prompt": "question"}
PARQUET = "train-00000-of-00001.parquet"


def task(path: Path, name: str = "hf_dataset", **more: Any) -> TaskConfig:
    return TaskConfig(name=name, path=str(path), columns=COLUMNS, reward="exact_match", **more)  # type: ignore[arg-type]


def rows_of(path: Path) -> list[dict[str, Any]]:
    source = PromptFiles(task(path), 0)
    items = [source.item(index) for index in range(source.size)]
    return [{"question": i.prompt, "answer": i.answer, **i.extra} for i in items]


@pytest.mark.parametrize("path", ["saved", PARQUET, "train-*.parquet"])
def test_rows_are_those_that_datasets_wrote(path: str) -> None:
    assert rows_of(DATA / path) == ROWS


def test_a_shuffled_data_set_and_a_split() -> None:
    assert [row["question"] for row in rows_of(DATA / "shuffled")] == [
        "5+5=", "0+0=", "1+1=", "4+4=", "2+2=",
    ]  # fmt: skip
    assert rows_of(DATA / "splits/test") == ROWS[5:]


def test_a_folder_and_single_files(tmp_path: Path) -> None:
    shards = [f"data-{part:05}-of-00002.arrow" for part in range(2)]
    (tmp_path / "folder").mkdir()
    for shard in shards:
        shutil.copy(DATA / "saved" / shard, tmp_path / "folder")
    assert rows_of(tmp_path / "folder") == ROWS
    assert rows_of(DATA / "saved" / shards[1]) == ROWS[4:]


def test_the_other_arrow_format(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import ipc

    table = pyarrow.Table.from_pylist(ROWS)
    path = tmp_path / "rows.arrow"
    with ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    assert rows_of(path) == ROWS


def test_json_lines_have_columns_too() -> None:
    source = PromptFiles(task(DATA / "rows.jsonl", "jsonl"), 0)
    table = PromptFiles(task(DATA / "saved"), 0)
    for index in range(len(ROWS)):
        one, other = source.item(index), table.item(index)
        assert (one.prompt, one.answer, one.extra) == (other.prompt, other.answer, other.extra)


def test_prompts_in_epochs(tiny_model: Path) -> None:
    stream = PromptStream(task(DATA / "saved"), load_tokenizer(tiny_model), seed=1)
    prompts = [stream.prompt(index) for index in range(14)]
    want = sorted(row["question"] for row in ROWS)
    first, second = prompts[:7], prompts[7:]
    assert sorted(p.text for p in first) == sorted(p.text for p in second) == want
    assert [p.text for p in first] != [p.text for p in second]
    assert prompts[0].extra.keys() == {"level", "tags"}


def first_item(path: Path, columns: dict[str, str]) -> None:
    settings = [f"task.path={path}", f"task.columns={json.dumps(columns)}"]
    config = load_config(
        "quickstart", ["task.name=hf_dataset", "task.reward=exact_match", *settings]
    )
    check(config)
    PromptFiles(config.task, 0).item(0)


def refused(path: Path, columns: dict[str, str] = COLUMNS) -> str:
    with pytest.raises(ConfigError) as caught:
        first_item(path, columns)
    return str(caught.value)


def test_refusals_name_the_path_and_what_is_allowed(tmp_path: Path) -> None:
    assert "splits: train, test" in refused(DATA / "splits")
    assert "save_to_disk" in refused(tmp_path / "none")
    assert "save_to_disk" in refused(tmp_path)
    assert "save_to_disk" in refused(DATA / "rows.jsonl")
    torn = tmp_path / "torn.parquet"
    torn.write_bytes((DATA / PARQUET).read_bytes()[:-9])
    assert "readable file is needed" in refused(torn)
    (tmp_path / "torn.arrow").write_bytes(b"ARROW")
    assert "readable file is needed" in refused(tmp_path / "torn.arrow")
    assert "has no 'text'" in refused(DATA / "saved", {"prompt": "text"})
    assert "exactly one" in refused(DATA / "saved", {})
    assert "'prompt', 'messages', 'tools', 'answer'" in refused(DATA / "saved", {"reply": "answer"})


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pyarrow is not installed; .*'\.\[tables\]'"):
        PromptFiles(task(DATA / "saved"), 0)
