"""The lists under "How to add ..." in CONTRIBUTING.md, carried out on copies of this repository.

A list is complete when a test that uses the addition through its settings passes; each product file
of the list is needed: without its edit the same test fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.patience import patience

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Addition:
    """edits: by file, the text before which a text is put ("" = the end), and that text.

    test: a test, or a file with `only` as its expression, that then passes.
    """

    edits: Mapping[str, tuple[str, str]]
    test: str
    only: str = ""


# Files of a list that only some additions need.
UNUSED = {
    "An algorithm: advantage, objective, correction, KL, aggregation": {"moerl/config/schema.py"},
}


ADDITIONS = {
    "A reward": Addition(
        {
            "moerl/data/rewards.py": (
                "",
                """

def share_of_words(prompt: Prompt, response: str) -> float:
    wanted = str(prompt.answer).split()
    return sum(word in response.split() for word in wanted) / max(1, len(wanted))
""",
            ),
            "moerl/config/task_tables.py": (
                '        "turn_gains": RewardEntry(',
                '        "share_of_words": RewardEntry("rewards:share_of_words"),\n',
            ),
            "tests/unit/test_tasks.py": (
                "",
                """

@pytest.mark.parametrize(
    ("text", "want"), [("red blue", 1.0), ("red", 0.5), ("green", 0.0), ("", 0.0)]
)
def test_share_of_words(text: str, want: float) -> None:
    reward = make_reward(TaskConfig(reward="share_of_words"))
    assert reward(Prompt(0, (1,), "p", "red blue", {}), view(text)).reward == want
""",
            ),
            "docs/scoring.md": (
                "| `math_verify`",
                "| `share_of_words` | the share of the answer's words |\n",
            ),
        },
        "tests/unit/test_tasks.py::test_share_of_words",
    ),
    "A source of prompts": Addition(
        {
            "moerl/data/tasks.py": (
                "class PromptStream:",
                """class Echo:
    size = 5

    def __init__(self, task: TaskConfig, seed: int) -> None:
        self._seed = seed

    def item(self, index: int) -> Item:
        return Item(f"say {index + self._seed}", str(index + self._seed))


""",
            ),
            "moerl/config/task_tables.py": (
                '        "reasoning_gym": SourceEntry(',
                '        "echo": SourceEntry("tasks:Echo", reward="rewards:exact_match"),\n',
            ),
            "tests/unit/test_tasks.py": (
                "",
                """

def test_echo(tokenizer: Any) -> None:
    task = TaskConfig(name="echo")
    prompts = [PromptStream(task, tokenizer, 7).prompt(index) for index in range(5)]
    assert sorted(prompt.answer for prompt in prompts) == ["10", "11", "7", "8", "9"]
    assert make_reward(task)(prompts[0], view(prompts[0].answer)).reward == 1.0
""",
            ),
            "docs/data.md": ("| `hf_dataset`", "| `echo` | none |\n"),
        },
        "tests/unit/test_tasks.py::test_echo",
    ),
    "An environment": Addition(
        {
            "moerl/data/environments.py": (
                "def check_digits(",
                """def once_more(prompt: Prompt, responses: Sequence[str]) -> str:
    return prompt.text if len(responses) == 1 else ""


""",
            ),
            "moerl/config/task_tables.py": (
                '    {"calculator": "environments:calculator"',
                '    {"once_more": "environments:once_more"} |\n',
            ),
            "tests/unit/test_tasks.py": (
                "",
                """

def test_once_more() -> None:
    from moerl.data.environments import make_environment

    reply = make_environment(TaskConfig(environment="once_more"))
    prompt = Prompt(0, (1,), "again", "", {})
    assert reply is not None and [reply(prompt, "x" * n) for n in (1, 2)] == ["again", ""]
""",
            ),
            "docs/environments.md": (
                "| `package.module:function`, `calculator`",
                "| `once_more` | text replies | the prompt comes twice |\n",
            ),
        },
        "tests/unit/test_tasks.py::test_once_more",
    ),
    "An algorithm: advantage, objective, correction, KL, aggregation": Addition(
        {
            "moerl/algorithms/objectives.py": (
                "def sapo(",
                """def half_clip(t: Tokens, old: Tensor, s: AlgorithmConfig) -> TokenLoss:
    ratio = _ratio(t.logprob, old)
    clipped = ratio.clamp(max=1.0 + s.clip_high)
    loss = -torch.minimum(ratio * t.advantage, clipped * t.advantage)
    return TokenLoss(loss, _nowhere(ratio), ratio > 1.0 + s.clip_high, _nowhere(ratio))


""",
            ),
            "moerl/config/algorithms.py": (
                '    sapo=Entry("objectives:sapo"',
                '    half_clip=Entry("objectives:half_clip", ("clip_high",), reweighs=True),\n',
            ),
            "tests/unit/test_algorithms.py": (
                "",
                """

def test_half_clip() -> None:
    from moerl.algorithms.registry import choose
    from moerl.config.algorithms import OBJECTIVES

    objective = choose("algorithm.objective", "half_clip", OBJECTIVES)
    assert objective.__name__ == "half_clip"
""",
            ),
            "docs/algorithms.md": ("| `sapo`", "| `half_clip` | - | - |\n"),
        },
        "tests/unit/test_algorithms.py::test_half_clip",
    ),
    "A transport of weights": Addition(
        {
            "moerl/weight_sync/transports/NAME.py": (
                "",
                """from moerl.weight_sync.transports.shm import SharedMemory


class Named(SharedMemory):
    name = "NAME"


def make(address: str) -> Named:
    return Named()
""",
            ),
            "moerl/weight_sync/transports/factory.py": (
                '    "disk": "disk",',
                '    "NAME": "NAME",\n',
            ),
            "moerl/config/schema.py": ('"cuda_ipc", "gloo"', '"NAME", '),
            "tests/helpers/transport_cases.py": (
                '    "disk": TransportCase(',
                '    "NAME": TransportCase(False, is_mapped=True, needs_receiver=False),\n',
            ),
            "docs/weight-sync.md": ("| `disk` | yes", "| `NAME` | yes | as shm | one machine |\n"),
        },
        "tests/multi/test_transports.py",
        "every_transport_is_here or (NAME and (knows or bytes or dead))",
    ),
    "A quantisation of weights": Addition(
        {
            "moerl/weight_sync/wire_formats.py": (
                "def engine_wants(",
                """class Fp8Rows(Fp8Blocks):
    name = quant_method = "fp8_rows"


FORMATS["fp8_rows"] = Fp8Rows()


""",
            ),
            "moerl/engine/weight_layout.py": (
                '    field = "engine.args.quantization"',
                '    if method == "fp8_rows":\n        return "fp8_rows"\n',
            ),
            "moerl/engine/plugin/loaded_weights.py": ('"Fp8MoEMethod")', '"Fp8RowsMethod", '),
            "moerl/engine/feature_table.py": ('"fp8"),\n            "quantize_and', '"fp8_rows", '),
            "tests/unit/test_quantize.py": (
                "",
                """

def test_fp8_rows() -> None:
    from moerl.engine import feature_table, weight_layout
    from moerl.engine.plugin import loaded_weights

    stored = {"quantization_config": {"quant_method": "fp8_rows"}}
    assert engine_wants(None, stored) == "fp8_rows"
    assert WirePolicy("bfloat16", "fp8_rows").format_of("q_proj.weight").name == "fp8_rows"
    assert weight_layout._quantization({"quantization": None}, stored) == "fp8_rows"
    assert "Fp8RowsMethod" in loaded_weights._BLOCK_METHODS
    feature_table.check("quantization", "fp8_rows", replay=True)
""",
            ),
            "docs/weight-sync.md": ("- **The sender converts.**", "- `fp8_rows` has scales.\n"),
        },
        "tests/unit/test_quantize.py::test_fp8_rows",
    ),
}


def listed(title: str) -> list[str]:
    """The first file that each numbered line of a list names."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split(f"### {title}\n")[1]
    lines = re.findall(r"^\d+\. `?([\w./-]+)", section.split("\n### ")[0], re.MULTILINE)
    return [line for line in lines if "/" in line]


def add(checkout: Path, addition: Addition, *, but: str = "") -> None:
    """Make the edits of an addition in a copy.  but: a file that keeps its text."""
    for name, (before, text) in addition.edits.items():
        path = checkout / name
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        assert not before or old.count(before) == 1, (
            f"{name} has {before!r} {old.count(before)} times"
        )
        if name != but:
            path.write_text(old.replace(before, text + before) if before else old + text)


def run(checkout: Path, addition: Addition) -> subprocess.CompletedProcess[str]:
    """The test of an addition, in a copy; without -k every test of its name or file."""
    chosen = ["-k", addition.only] if addition.only else []
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", addition.test]
    return subprocess.run(
        [*command, "-m", "full or not full", *chosen],
        cwd=checkout,
        env=dict(os.environ) | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=patience(240),
        check=False,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in ("moerl", "tests", "docs", "configs", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=LEFT_OUT)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize("title", ADDITIONS)
def test_a_list_names_every_file_of_its_addition(title: str, checkout: Path) -> None:
    addition = ADDITIONS[title]
    assert sorted(addition.edits) == sorted(set(listed(title)) - UNUSED.get(title, set()))
    add(checkout, addition)
    done = run(checkout, addition)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize(
    ("title", "left_out"),
    [
        (title, name)
        for title, addition in ADDITIONS.items()
        for name in addition.edits
        if name.startswith("moerl/")
    ],
)
def test_control_each_product_file_of_a_list_is_needed(
    title: str, left_out: str, checkout: Path
) -> None:
    add(checkout, ADDITIONS[title], but=left_out)
    assert run(checkout, ADDITIONS[title]).returncode != 0
