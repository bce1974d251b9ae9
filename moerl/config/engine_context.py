"""Tokens that an engine takes in one sequence, known from the settings and the model."""

from __future__ import annotations

from moerl.config.rules import Rows, refuse
from moerl.config.schema import Config, EngineConfig
from moerl.config.task_mixture import TaskEntry, entries_of, naming

# A request has at most min(context, cache) - 7 tokens (SGLang 0.5.23: `max_req_input_len` of
# tp_worker.py, `validate_input_length`), and a last one may resume all but one of a sequence.
_RESERVED = 6


def longest_sequence(engine: EngineConfig, max_positions: int) -> int:
    """Tokens of prompt and answer together.  max_positions: of the model's config.json."""
    context = int(engine.args.get("context_length") or max_positions)
    return min(context, engine.max_total_tokens or context) - _RESERVED


def check_context(config: Config, max_positions: int) -> None:
    """Refuse answers that fit behind no prompt.  Raises ConfigError.

    Agents are left out: their turns sample fewer tokens where the context ends.
    """
    most = longest_sequence(config.engine, max_positions)
    for entry in entries_of(config):
        with naming(entry):
            refuse({"task": entry}, _of_task(entry, most))


def _of_task(task: TaskEntry, most: int) -> Rows:
    answer = max(one.max_new_tokens for one in task.samplings.values())
    if answer >= most and not task.kind.uses_chat:
        yield (
            "sampling.max_new_tokens",
            answer,
            f"the engines take {most} tokens of prompt and answer together "
            "(engine.args.context_length, engine.max_total_tokens, the model's positions)",
        )
    if task.context_tokens > most:
        yield "task.context_tokens", f"the engines take at most {most}"
