"""Calls of a task's reward before anything starts, in a worker as the run's own.

A value that is no score fails every response, and would be seen only when engines have answered.  A
reward may raise for one text and be right for others: that is reported and refuses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from moerl.config.functions import place_of
from moerl.config.reward_checks import split_form
from moerl.config.schema import TaskConfig
from moerl.config.task_kinds import TaskKind
from moerl.config.task_mixture import naming
from moerl.core.episode_view import EpisodeView, TurnView
from moerl.core.errors import ConfigError
from moerl.core.types import Prompt
from moerl.data.prompt_checks import LineCheck
from moerl.sandbox.limits import isolation_of
from moerl.scoring.process import WorkerProcess, checked
from moerl.scoring.worker import WorkerAnswer


class RewardTrial:
    """One worker with the reward of a task."""

    def __init__(self, lines: LineCheck, task: TaskConfig) -> None:
        """Raises ConfigError if this machine cannot isolate the reward as the task wants."""
        self._template = lines.stream.template
        self._worker = WorkerProcess(isolation_of(task), task, task.score_timeout_s)

    def score(self, prompt: Prompt, response: str) -> WorkerAnswer:
        """A score or a failure, for an episode of one turn."""
        ids = self._template.encode_plain(response, begin=False) if self._template else ()
        turn = TurnView("0.0.t0", "", prompt.text, response, tuple(ids), "stop")
        return checked(self._worker.ask(prompt, EpisodeView("0.0", (turn,))), [response])

    def said(self, prompt: Prompt, response: str) -> str:
        """The reward, or why there is none."""
        answer = self.score(prompt, response)
        problem = f"no reward: it {answer.failure}"
        return problem if answer.score is None else f"{answer.score.reward:g}"

    def close(self) -> None:
        self._worker.close()


def samples(prompt: Prompt) -> list[str]:
    """Responses to try: the answer of the prompt, and nothing."""
    return list(dict.fromkeys(["" if prompt.answer is None else str(prompt.answer), ""]))


def try_rewards(checks: Sequence[LineCheck], *, here: bool = True) -> list[str]:
    """Sentences about own rewards that raise for a sample of their first prompt.

    Episodes of several turns cannot be made up, so rewards of agents and environments are left out.
    here: the run's own workers start on this machine, so packages and isolation must be here.
    Raises ConfigError for a reward that cannot be used.
    """
    said = []
    for lines in checks:
        if lines.task.kind is TaskKind.SINGLE_ANSWER:
            with naming(lines.task):
                for task in lines.task.own_rewards:
                    said += _tried(lines, task, here=here)
    return said


def _tried(lines: LineCheck, task: TaskConfig, *, here: bool) -> list[str]:
    said: list[str] = []
    try:
        trial = RewardTrial(lines, task)
    except ConfigError as error:
        if here:
            raise
        return [f"task.reward = {task.reward} was not tried: {error}"]
    with closing(trial):
        prompt = next(lines.prompts())
        for response in samples(prompt):
            answer = trial.score(prompt, response)
            asked = f"for {prompt.name} and the response {response[:60]!r}"
            if answer.fault == "start" and not here:
                return [f"task.reward = {task.reward} was not tried: it {answer.failure}"]
            if answer.fault:
                place = place_of(split_form(task.reward)[1])
                problem = f"it {answer.failure}, {asked} ({place})"
                raise ConfigError("task.reward", task.reward, problem)
            if answer.failure:
                said.append(f"task.reward = {task.reward}: it {answer.failure}, {asked}")
    return said
