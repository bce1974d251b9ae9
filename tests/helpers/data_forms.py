"""Small files in the forms that other systems document, with own content: sorted digits.

The lines of docs/data.md that train on them name the files and their columns.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ASKED = ("31=", "402=", "7=", "9158=")
ANSWERS = ["".join(sorted(asked[:-1])) for asked in ASKED]
_TOOL = {
    "type": "function",
    "function": {"name": "sort", "parameters": {"type": "object", "properties": {}}},
}

Row = dict[str, Any]


def user(text: str) -> list[Row]:
    return [{"role": "user", "content": text}]


def _verl(asked: str, answer: str, index: int) -> Row:
    return {
        "data_source": "own/digits",
        "prompt": user(asked),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": index, "answer": answer, "question": asked},
    }


def _verl_tools(asked: str, answer: str, index: int) -> Row:
    row = _verl(asked, answer, index)
    tools = {"sort": {"create_kwargs": {"ground_truth": answer}}}
    row["prompt"] = [{"role": "system", "content": "Sort."}, *row["prompt"]]
    row["extra_info"] |= {"need_tools_kwargs": True, "tools_kwargs": tools}
    return row | {"agent_name": "tool_agent"}


def _completion(asked: str, answer: str, index: int) -> Row:
    return {"prompt": user(asked), "completion": [{"role": "assistant", "content": answer}]}


def _gym(asked: str, answer: str, index: int) -> Row:
    asking = {"input": [{"role": "developer", "content": "Sort."}, *user(asked)], "tools": [_TOOL]}
    return {"responses_create_params": asking, "expected_answer": answer, "id": index}


FORMS: Mapping[str, Callable[[str, str, int], Row]] = {
    "verl.parquet": _verl,
    "verl-tools.parquet": _verl_tools,
    "slime.jsonl": lambda asked, answer, _: {"prompt": user(asked), "label": answer},
    "slime-tools.jsonl": lambda asked, answer, index: {
        "text": user(asked),
        "label": answer,
        "metadata": {"rm_type": "f1", "index": index},
        "tools": [_TOOL],
    },
    "trl.jsonl": lambda asked, answer, _: {"prompt": asked, "ground_truth": answer},
    "trl-chat.parquet": lambda asked, answer, _: {"prompt": user(asked), "solution": answer},
    "trl-completion.jsonl": _completion,
    "openrlhf.jsonl": lambda asked, answer, _: {"input": asked, "label": answer},
    "openrlhf-chat.json": lambda asked, answer, _: {
        "context_messages": user(asked),
        "answer": answer,
        "datasource": "own",
    },
    "prime-rl": lambda asked, answer, index: {
        "question": asked,
        "answer": answer,
        "info": {"difficulty": index},
        "task": "digits",
    },
    "nemo-rl.jsonl": lambda asked, answer, _: {"input": asked, "output": answer},
    "nemo-gym.jsonl": _gym,
}


def write(folder: Path) -> None:
    """Write all files of FORMS."""
    for name, form in FORMS.items():
        rows = [form(*pair, index) for index, pair in enumerate(zip(ASKED, ANSWERS, strict=True))]
        path = folder / name
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows, indent=1))
        else:
            _write_table(path, rows)


def _write_table(path: Path, rows: list[Row]) -> None:
    """A parquet file, or a folder as `datasets.save_to_disk` writes it."""
    import pyarrow
    from pyarrow import ipc, parquet

    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
        return
    path.mkdir()
    with ipc.new_stream(str(path / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    (path / "state.json").write_text(json.dumps(state))


def lines() -> list[str]:
    """The commands of docs/data.md that train on these files."""
    page = (Path(__file__).resolve().parents[2] / "docs/data.md").read_text()
    beginning = "moerl train quickstart-smoke "
    return [line for line in page.splitlines() if line.startswith(beginning)]


def words_of(name: str) -> list[str]:
    """Recipe and settings of the command for one of the files."""
    (found,) = [line for line in lines() if f"task.path={name} " in line]
    return shlex.split(found)[2:]
