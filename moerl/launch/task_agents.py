"""Makes the agents that play the episodes of each task with an agent, from the run's settings."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from moerl.config.task_mixture import TaskEntry, entries_of, naming
from moerl.core.errors import ConfigError

if TYPE_CHECKING:
    from moerl.agents.agent_loop import AgentRunner
    from moerl.agents.agents_by_task import AgentsByTask
    from moerl.agents.tool_calls import AnswerParser
    from moerl.launch.run_context import RunContext


def task_agents(context: RunContext) -> AgentsByTask | None:
    """None: no task has an agent.  Raises ConfigError."""
    playing = [entry for entry in entries_of(context.config) if entry.agent.plays]
    if not playing:
        return None
    from moerl.agents.agents_by_task import AgentsByTask

    runners = {}
    for entry in playing:
        with naming(entry):
            runners[entry.label] = _runner(context, entry)
    return AgentsByTask(runners)


def _runner(context: RunContext, task: TaskEntry) -> AgentRunner:
    from moerl.agents.agent_loop import PolicySettings, no_grammar
    from moerl.agents.environments.environment_episodes import EnvironmentEpisodes
    from moerl.agents.environments.environment_pool import EnvironmentPool
    from moerl.agents.programs.agent_process import program_of
    from moerl.agents.programs.agent_programs import AgentPrograms
    from moerl.agents.prompt_tokens import PromptTokens
    from moerl.controller.rollout_builder import sampling_params
    from moerl.records.blob_ranges import read_logprobs

    agent, shape = task.agent, context.model_shape()
    if agent.command:
        program_of(agent.command)
    if agent.context_tokens > shape.context_tokens:
        problem = f"the engines take at most {shape.context_tokens}"
        raise ConfigError("task.agent.context_tokens", agent.context_tokens, problem)
    settings = PolicySettings(
        tokens=PromptTokens(context.tokenizer()),
        parser=_answer_parser(agent.call_format, agent.reasoning_format),
        sampling=sampling_params(task.sampling, shape),
        context_tokens=agent.context_tokens or shape.context_tokens,
        audit=context.config.replay.audit,
        logprobs=partial(read_logprobs, context.blobs()),
        no_grammar=no_grammar(agent, masks=context.config.replay.sampling_mask),
    )
    if agent.environment:
        return EnvironmentEpisodes(task, settings, EnvironmentPool(task))
    name = f"agents-{task.label}.log" if task.label else "agents.log"
    return AgentPrograms(task, settings, context.run.logs / name)


def _answer_parser(call_format: str, reasoning_format: str) -> AnswerParser:
    from moerl.agents.tool_calls import PlainAnswers
    from moerl.engine.host.answer_parser import SglangAnswers

    if not (call_format or reasoning_format):
        return PlainAnswers()
    return SglangAnswers(call_format, reasoning_format)
