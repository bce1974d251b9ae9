"""Makes the agents that play the episodes of each task with an agent, from the run's settings."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from moerl.config.clusters import takes_turns
from moerl.config.task_kinds import TaskKind
from moerl.config.task_mixture import TaskEntry, entries_of, naming

if TYPE_CHECKING:
    from moerl.agents.agent_loop import AgentRunner
    from moerl.agents.episode_types import AnswerParser
    from moerl.launch.run_context import RunContext


def task_agents(context: RunContext) -> dict[str, AgentRunner]:
    """By label of the task.  Raises ConfigError."""
    runners = {}
    for entry in entries_of(context.config):
        with naming(entry):
            if entry.kind.uses_chat:
                runners[entry.label] = _runner(context, entry)
    return runners


def _runner(context: RunContext, task: TaskEntry) -> AgentRunner:
    from moerl.agents.agent_loop import no_grammar
    from moerl.agents.environments.environment_episodes import EnvironmentEpisodes
    from moerl.agents.environments.environment_pool import EnvironmentPool
    from moerl.agents.episode_types import Policy
    from moerl.agents.programs.agent_process import program_of
    from moerl.agents.programs.agent_programs import AgentPrograms
    from moerl.agents.programs.remote_workers import RemoteWorkers
    from moerl.agents.prompt_tokens import PromptTokens
    from moerl.agents.stop_texts import StopFinder
    from moerl.data.chat_template import ChatTemplate
    from moerl.records.blob_ranges import read_logprobs

    if task.agent.command:
        program_of(task.agent.command)
    template = ChatTemplate(context.tokenizer(), task.chat_template, task.template_arguments)
    tokens = PromptTokens(context.tokenizer(), template)
    policy = Policy(
        tokens=tokens,
        finder=StopFinder(tokens),
        parser=_answer_parser(task.call_format, task.reasoning_format),
        context_tokens=task.context_tokens or context.model_shape().context_tokens,
        logprobs=partial(read_logprobs, context.blobs()),
        no_grammar=no_grammar(task.agent, masks=context.config.replay.sampling_mask),
    )
    if task.kind is TaskKind.ENVIRONMENT:
        return EnvironmentEpisodes(task, policy, EnvironmentPool(task))
    end, remote = f"-{task.label}" if task.label else "", None
    if task.agent.port:
        file = context.journal_folder / f"submitted{end}.jsonl"
        remote = RemoteWorkers(task, context.run.root / "worker-token", file)
    log_file = context.run.logs / f"agents{end}.log"
    turns = takes_turns(context.config.cluster)
    return AgentPrograms(task, policy, log_file, remote, context.scratch, awaits_retries=turns)


def _answer_parser(call_format: str, reasoning_format: str) -> AnswerParser:
    from moerl.agents.episode_types import PlainAnswers
    from moerl.engine.host.answer_parser import SglangAnswers

    if not (call_format or reasoning_format):
        return PlainAnswers()
    return SglangAnswers(call_format, reasoning_format)
