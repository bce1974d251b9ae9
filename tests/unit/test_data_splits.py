"""Splits are named and never joined; csv, gzip and `~` are read; held-out lines are counted."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moerl.cli import app
from moerl.config import load_config
from moerl.config.checks import check
from moerl.config.schema import TaskConfig
from moerl.config.task_mixture import entries_of
from moerl.core.errors import ConfigError, LineError
from moerl.data.prompt_files import PromptFiles
from moerl.launch.run_context import held_out_entries

ROWS = [{"prompt": f"{n}+0=", "answer": str(n)} for n in range(6)]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    """A file of the form that its name tells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.name.endswith(".jsonl"):
        path.write_text(text)
    elif path.name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        import pyarrow
        from pyarrow import csv as arrow_csv
        from pyarrow import ipc, parquet

        table = pyarrow.Table.from_pylist(rows)
        if path.suffix == ".csv":
            arrow_csv.write_csv(table, path)
        elif path.suffix == ".parquet":
            parquet.write_table(table, path)
        else:
            with ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table)
    return path


def answers(path: Path | str, **more: Any) -> list[str]:
    name = more.pop("name", "jsonl")
    task = TaskConfig(name=name, path=str(path), reward="exact_match", **more)
    source = PromptFiles(task, 0)
    return [source.item(place).answer for place in range(source.size)]


def refused(path: Path | str, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        answers(path, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def saved(folder: Path, rows: list[dict[str, str]]) -> None:
    """As `Dataset.save_to_disk` of datasets 5 lays it out."""
    name = "data-00000-of-00001.arrow"
    write(folder / name, rows)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    (folder / "dataset_info.json").write_text("{}")


# --- splits ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("train", "test", "names"),
    [
        ("train.jsonl", "test.jsonl", ("train", "test")),
        ("gsm8k_train.jsonl.gz", "gsm8k_test.jsonl.gz", ("train", "test")),
        ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet", ("train", "test")),
        ("a_sft-00000-of-00001.parquet", "a_gen-00000-of-00001.parquet", ("a_sft", "a_gen")),
        ("train.csv", "validation.csv", ("train", "validation")),
        ("prompts.jsonl", "held-out-test.jsonl", ("prompts", "test")),
        ("train/x.jsonl", "test/x.jsonl", ("train/", "test/")),
        ("main/train.jsonl", "socratic/train.jsonl", ("main/train", "socratic/train")),
    ],
)  # fmt: skip
def test_two_splits_are_never_joined(
    train: str, test: str, names: tuple[str, str], tmp_path: Path
) -> None:
    kind = "jsonl" if "jsonl" in train else "hf_dataset"
    write(tmp_path / train, ROWS[:4])
    assert answers(tmp_path, name=kind) == list("0123"), "control: one split needs no setting"
    write(tmp_path / test, ROWS[4:])
    said = refused(tmp_path, name=kind)
    assert all(name in said for name in names), said
    assert "name one in task.split, or evaluation.split" in said
    for name, want in zip(names, ("0123", "45"), strict=True):
        assert answers(tmp_path, name=kind, split=name) == list(want)
    assert names[0] in refused(tmp_path, name=kind, split="dev")
    if "/" not in train:
        pattern = tmp_path / f"*{Path(train).suffix}"
        assert "name one in task.split" in refused(pattern, name=kind)


def test_parts_without_a_split_are_joined(tmp_path: Path) -> None:
    for part, rows in (("contest-0", ROWS[:4]), ("latest-1", ROWS[4:])):
        write(tmp_path / f"{part}.jsonl", rows)
    assert answers(tmp_path) == list("012345")
    for part in range(2):
        write(tmp_path / f"d/data/train-{part:05}-of-00002.parquet", ROWS[3 * part : 3 * part + 3])
    assert answers(tmp_path / "d", name="hf_dataset") == list("012345"), "a folder of the hub"
    said = refused(tmp_path, split="train")
    assert "task.split = 'train' is not usable" in said
    assert "no split in the names of its files" in said


def test_a_saved_dict_of_splits(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    saved(tmp_path / "train", ROWS[:4])
    saved(tmp_path / "test", ROWS[4:])
    assert "the splits: train, test" in refused(tmp_path, name="hf_dataset")
    assert answers(tmp_path, name="hf_dataset", split="test") == list("45")
    assert answers(tmp_path / "train", name="hf_dataset") == list("0123")
    (tmp_path / "test/state.json").unlink()
    assert "save_to_disk" in refused(tmp_path, name="hf_dataset", split="test")


def settings(folder: Path, *more: str) -> list[str]:
    return ["task.name=jsonl", f"task.path={folder}", "task.reward=exact_match", *more]


def test_held_out_prompts_are_a_split_of_the_same_folder(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS[:4])
    write(tmp_path / "test.jsonl", ROWS[4:])
    words = settings(tmp_path, "task.split=train", "evaluation.every=1")
    config = load_config("quickstart-smoke", [*words, "evaluation.split=test"])
    check(config, starts=False)
    ((training,), (held_out,)) = entries_of(config), held_out_entries(config)
    assert PromptFiles(training, 0).size == 4
    assert [PromptFiles(held_out, 0).item(n).answer for n in range(2)] == list("45")
    for split in ("train", "''"):
        with pytest.raises(ConfigError, match=r"evaluation\.path"):
            check(load_config("quickstart-smoke", [*words, f"evaluation.split={split}"]))


def test_entries_of_a_mixture_have_splits_of_their_own(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS[:4])
    write(tmp_path / "test.jsonl", ROWS[4:])
    entry = f"{{label: a, name: jsonl, path: {tmp_path}, reward: exact_match, split: train, "
    words = [f"tasks=[{entry} evaluation_split: test}}]", "evaluation.every=1"]
    config = load_config("quickstart-smoke", words)
    check(config, starts=False)
    assert [PromptFiles(one, 0).size for one in entries_of(config)] == [4]
    assert [PromptFiles(one, 0).size for one in held_out_entries(config)] == [2]
    with pytest.raises(ConfigError, match=r"evaluation\.split .*tasks\.LABEL\.evaluation_split"):
        check(load_config("quickstart-smoke", [*words, "evaluation.split=test"]))


def test_overlap_is_counted_and_files_are_named(tmp_path: Path) -> None:
    train, test = write(tmp_path / "a.jsonl", ROWS), write(tmp_path / "b.jsonl", ROWS[4:])
    words = settings(train, f"evaluation.path={test}", "evaluation.every=1")
    warning = f"warning: 2 of 2 held-out prompts of {test} are in {train} too"
    done = CliRunner().invoke(app, ["data", "quickstart-smoke", *words])
    assert warning in done.output
    assert f"file        {train}: 6" in done.output
    assert (
        warning
        in CliRunner().invoke(app, ["train", "quickstart-smoke", *words, "--dry-run"]).output
    )
    write(test, [{"prompt": "9+0=", "answer": "9"}])
    done = CliRunner().invoke(app, ["data", "quickstart-smoke", *words])
    assert (done.exit_code, "warning" in done.output) == (0, False), "control"


# --- forms ----------------------------------------------------------------------------------------
def test_csv_is_read_as_pythons_own_reader_reads_it(tmp_path: Path) -> None:
    rows = [["prompt", "answer", "note"], ["1+1=", "007", ""], ['a "b",\nc', "1e3", "é"]]
    rows += [["2026-11-28", " x ", "NA"]]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows(rows)
    with path.open(newline="", encoding="utf-8-sig") as file:
        want = list(csv.DictReader(file))
    packed = tmp_path / "rows.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for one in (path, packed):
        source = PromptFiles(TaskConfig(name="hf_dataset", path=str(one)), 0)
        items = [source.item(place) for place in range(source.size)]
        assert [{"prompt": i.prompt, "answer": i.answer, **i.extra} for i in items] == want
        assert str(items[1].origin) == f"row 1 of {one}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"prompt,answer\n1,2\n1,2,3\n", "Row #3: Expected 2 columns, got 3"),
        (b"prompt,answer\n1,\xff\n", "invalid UTF8 data"),
        (b"prompt,answer,answer\n1,2,3\n", "it has the column 'answer' twice"),
        (b"", "Empty CSV file"),
    ],
)
def test_a_csv_that_cannot_be_read_is_one_sentence(text: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(text)
    assert says in refused(tmp_path / "x.csv", name="hf_dataset")
    assert "task.name=hf_dataset reads csv" in refused(tmp_path / "x.csv")


def test_lines_by_gzip_are_those_of_the_plain_file(tmp_path: Path) -> None:
    for text in ("\n".join(map(json.dumps, ROWS)), json.dumps(ROWS)):
        path = tmp_path / "x.json.gz"
        path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + text.encode()))
        assert answers(path) == list("012345")
    cut = tmp_path / "cut.jsonl.gz"
    for data in (path.read_bytes()[:-9], b"no gzip"):
        cut.write_bytes(data)
        assert "a readable file is needed" in refused(cut)
    write(tmp_path / "x.jsonl.gz", ROWS)
    source = PromptFiles(TaskConfig(name="jsonl", path=str(tmp_path / "x.jsonl.gz")), 0)
    assert str(source.origin(5)) == f"line 6 of {tmp_path / 'x.jsonl.gz'}"


def test_home_is_expanded_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = ["task.path", "evaluation.path", "model.path", "run.root", "algorithm.reference"]
    paths += ["checkpoint.start", "sync.folder", "rollout.journal_dir", "cluster.blob_dir"]
    paths += ["lora.start"]
    config = load_config("quickstart-smoke", [f"{path}=~/x" for path in paths])
    for path in paths:
        section, name = path.split(".")
        assert getattr(getattr(config, section), name) == str(tmp_path / "x"), path
    (entry,) = entries_of(load_config("quickstart-smoke", ["tasks=[{label: a, path: ~/x}]"]))
    assert entry.path == str(tmp_path / "x")
    text = load_config("quickstart-smoke", ["task.system=~/x"]).task.system
    assert text == "~/x", "control: it is no path"


# --- errors and memory ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": ', "line 2 is not JSON: Expecting value: column 11 (char 10)"),
        ('{"prompt": "1"} x', "line 2 is not JSON: Extra data: column 17 (char 16)"),
    ],
)
def test_an_error_has_the_line_of_the_file_alone(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f"{json.dumps(ROWS[0])}\n{line}\n{json.dumps(ROWS[1])}\n")
    with pytest.raises(LineError) as caught:
        answers(path)
    assert str(caught.value).endswith(says)


_MEMORY = """
import resource, sys
from moerl.config.schema import TaskConfig
from moerl.core.errors import ConfigError
from moerl.data.tasks import PromptStream, load_tokenizer
task = TaskConfig(name="jsonl", path=sys.argv[2], reward="exact_match", shuffle=False)
stream = PromptStream(task, load_tokenizer(sys.argv[1]), 0)
stream.prompt(0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    stream.prompt(1)
except ConfigError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_line_of_megabytes_is_refused_in_bounded_memory(tmp_path: Path, tiny_model: Path) -> None:
    """Its 2 million tokens took 800 MB; the text itself takes 2 MB."""
    rows = [ROWS[0], {"prompt": "12=4 " * 400_000, "answer": "1"}]
    path = write(tmp_path / "x.jsonl", rows)
    command = [sys.executable, "-c", _MEMORY, str(tiny_model), str(path)]
    said, grown = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "line 2 of" in said
    assert "at least" in said
    assert int(grown) < 60_000, f"{grown} KiB"
