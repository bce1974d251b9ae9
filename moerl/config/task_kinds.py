"""Kinds of tasks, by what answers the policy between its turns."""

from __future__ import annotations

from enum import Enum

SANDBOX_TOOLS, HTTP = READY_ENVIRONMENTS = ("sandbox_tools", "http")
SOURCE = "source"  # task.reward: the function of the source of prompts


class TaskKind(Enum):
    SINGLE_ANSWER = "single answer"
    TEXT_REPLIES = "text replies"  # of a function, put into the context as they are
    ENVIRONMENT = "environment object"
    PROGRAM = "program"

    @property
    def uses_chat(self) -> bool:
        """Whether a turn answers messages, which the model's chat template renders."""
        return self in (TaskKind.ENVIRONMENT, TaskKind.PROGRAM)


def kind_of_environment(name: str) -> TaskKind:
    """By the form of `task.environment`: the name of a class begins with a capital letter."""
    if not name:
        return TaskKind.SINGLE_ANSWER
    is_class = name.rpartition(":")[2][:1].isupper() and ":" in name
    is_object = name in READY_ENVIRONMENTS or is_class
    return TaskKind.ENVIRONMENT if is_object else TaskKind.TEXT_REPLIES
