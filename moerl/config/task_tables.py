"""The rewards, environments and sources of prompts that a recipe can name: one line each.

A line names a function or class below `moerl.data`.  Adding a reward is that function and its line
here.  The tables are plain data, so a dry run on a login node checks names without importing torch,
a data package or a reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from moerl.config.schema import TaskConfig
from moerl.config.task_kinds import READY_ENVIRONMENTS, SOURCE
from moerl.core.errors import ConfigError

PACKAGE = "moerl.data"


@dataclass(frozen=True, slots=True)
class RewardEntry:
    """A reward function (prompt, response) -> number.

    scores_steps: the function has the form (prompt, responses) -> Score instead and gives each step
    of a response, or each turn, its reward.  requires: an optional package, by its import name.
    """

    function: str
    scores_steps: bool = False
    requires: str = ""


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """A class with `size` and `item(index)`, made with (task settings, seed).

    reward: the function (prompt, response) -> number of a task whose reward is empty or `source`.
    files: description of `task.path` for a source that reads its prompts from files.
    """

    factory: str
    reward: str = ""
    files: str = ""


REWARDS: Mapping[str, RewardEntry] = MappingProxyType(
    {
        "exact_match": RewardEntry("rewards:exact_match"),
        "math_verify": RewardEntry("rewards:math_verify", requires="math_verify"),
        "position_steps": RewardEntry("rewards:position_steps", scores_steps=True),
        "turn_gains": RewardEntry("rewards:turn_gains", scores_steps=True),
    }
)
REWARD_NAMES = (*REWARDS, SOURCE)
EXTRACTS = ("", "all", "answer", "tags", "last_number")  # or a regular expression
STEP_REWARDS = tuple(name for name, reward in REWARDS.items() if reward.scores_steps)
ENVIRONMENTS: Mapping[str, str] = MappingProxyType(
    {"calculator": "environments:calculator", "check_digits": "environments:check_digits"}
)
"""Functions (prompt, responses so far) -> text between turns, by name."""
ENVIRONMENT_NAMES = (*ENVIRONMENTS, *READY_ENVIRONMENTS, "package.module:Class")
SOURCES: Mapping[str, SourceEntry] = MappingProxyType(
    {
        "sort_digits": SourceEntry("tasks:SortDigits", reward="rewards:right_positions"),
        "calculator": SourceEntry("tasks:Products", reward="rewards:exact_match"),
        "reasoning_gym": SourceEntry("tasks:ReasoningGym"),
        "jsonl": SourceEntry(
            "prompt_files:PromptFiles",
            files="a readable file of JSON lines or a JSON array, or .gz, a folder or pattern "
            "of them (task.name=hf_dataset reads csv, parquet and arrow),",
        ),
        "hf_dataset": SourceEntry(
            "prompt_files:PromptFiles",
            files="a folder of datasets.save_to_disk, or *.parquet, *.arrow and *.csv files,",
        ),
    }
)
# Data sets of reasoning-gym 0.1.25 whose scorers run the policy's answer as Python, by eval or
# sympy's parse_expr; `composite` calls the scorers of others.
EVALUATING = frozenset(
    {
        "binary_matrix",
        "composite",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)


def check_isolation(task: TaskConfig) -> None:
    """Raises ConfigError for a task that runs the policy's text outside a sandbox."""
    evaluates = task.name == "reasoning_gym" and task.dataset in EVALUATING
    if evaluates and task.isolation != "bwrap":
        raise ConfigError(
            "task.isolation",
            task.isolation,
            f"the scorer of {task.dataset} runs the policy's answer as Python; use bwrap",
        )
