"""Metrics of one optimizer step: sums since the last one, batch statistics, and a sample.

An episode as the report shows it: each turn with its prompt.

A row that continues another shows only its new tokens, so that each token is shown once.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np

from moerl.config import Config
from moerl.config.task_mixture import by_label
from moerl.core.messages import EngineStatus
from moerl.core.step_counts import LAGS, TOTALS, row_of
from moerl.core.types import (
    Array,
    Episode,
    EpisodeGroup,
    Finish,
    GraphTurn,
    PolicyVersion,
    Rollout,
    base_role,
)
from moerl.episodes.finished_episode import BLOCKED

_PER_TASK = (
    "reward/mean",
    "reward/std",
    "reward/zero_var_frac",
    "sample/length_mean",
    "sample/truncated_frac",
    "sample/turns_mean",
)


@dataclass(slots=True)
class ScorerCounts:
    """Work of one scorer since the last step."""

    asked: int = 0
    repeated: int = 0  # requests that were not answered
    unscored: int = 0  # requests that were given up, or refused by the scorer
    waiting_max: int = 0  # questions that waited at once
    wait_s: float = 0.0  # sum over the requests, until they were sent
    messages: int = 0
    answer_s: float = 0.0  # sum over the messages
    cost: float = 0.0  # sum of the metric `cost` of its scores

    def take(self, name: str) -> dict[str, float]:
        """Metrics of a step, once; none without requests."""
        if not (self.asked or self.messages):
            return {}
        found = asdict(self)
        found["wait_s"] /= max(1, self.asked)
        found["answer_s"] /= max(1, found.pop("messages"))
        if not self.cost:
            del found["cost"]
        self.__init__()  # type: ignore[misc]
        return {f"scorer/{key}/{name}": float(value) for key, value in found.items()}


class StepMetrics:
    """Counts since the last optimizer step, by name; `moerl.core.step_counts` has their rules."""

    def __init__(self) -> None:
        self.evaluations: deque[dict[str, float]] = deque()  # finished evaluations, in no row yet
        self.notices: list[str] = []  # for the console, not shown yet
        self.scorers = defaultdict[str, ScorerCounts](ScorerCounts)  # by name
        self.last_failed_write = ""
        self._last = time.monotonic()
        self._engine_last: dict[int, EngineStatus] = {}
        self._counts: dict[str, float] = {}

    def __getitem__(self, name: str) -> float:
        return self._counts.get(name, 0.0)

    def add(self, name: str, amount: float = 1.0) -> None:
        self._counts[name] = self[name] + amount

    def add_all(self, counts: Mapping[str, float]) -> None:
        for name, count in counts.items():
            self.add(name, count)

    def episode_played(
        self, counts: Mapping[str, float], failure: str, graph: Sequence[GraphTurn]
    ) -> None:
        """Count an episode that was played.  failure: as FinishedEpisode."""
        for turn in graph:
            self.add(f"agent/graph/{turn.role}/{turn.left_out or 'trained'}")
        self.add_all({f"agent/{name}": count for name, count in counts.items()})
        self.add("agent/episodes")
        if failure and failure != BLOCKED:  # its group is played again
            self.add(f"agent/failed/{failure}")

    def forked(
        self, *, continuations: int = 0, fed: int = 0, cached: int = 0, given_up: int = 0
    ) -> None:
        """Count continuations, their prompt tokens, fed and cached, and pivots given up."""
        self.add_all({"fork/continuations": continuations, "fork/given_up": given_up})
        self.add_all({"fork_fed": fed, "fork_cached": cached})

    def totals(self) -> dict[str, float]:
        """Metrics that are counted from the start of the process on."""
        return {name: n for name, n in self._counts.items() if name.startswith(TOTALS)}

    def row(self, engines: list[EngineStatus], ages_s: Sequence[float] = ()) -> dict[str, float]:
        """Metrics of one step; call once per step.  Metrics that were not measured are absent.

        ages_s: seconds in buffer, per group of the last batch.
        """
        now = time.monotonic()
        elapsed = max(now - self._last, 1e-9)
        self._last = now
        row = row_of(self._counts)
        self._counts, self.last_failed_write = self.totals(), ""
        row["async/trainer_wait_frac"] = min(1.0, row["async/trainer_wait_s"] / elapsed)
        row |= self.evaluations.popleft() if self.evaluations else {}
        if ages_s:
            row["async/buffer_age_mean_s"] = statistics.fmean(ages_s)
            row["async/buffer_age_max_s"] = max(ages_s)
        row |= self._engines(engines, elapsed)
        for name, counts in self.scorers.items():
            row |= counts.take(name)
        return row

    def _engines(self, engines: list[EngineStatus], elapsed: float) -> dict[str, float]:
        tokens = busy = 0.0
        for status in engines:
            before = self._engine_last.get(status.engine)
            if before and before.generated_tokens > status.generated_tokens:
                before = None  # the engine was restarted
            tokens += status.generated_tokens - (before.generated_tokens if before else 0)
            busy += status.busy_s - (before.busy_s if before else 0.0)
            self._engine_last[status.engine] = status
        if not engines:
            return {}
        idle = 1.0 - min(1.0, busy / (elapsed * len(engines)))
        return {"perf/rollout_tokens_per_s": tokens / elapsed, "async/engine_idle_frac": idle}


def batch_metrics(groups: Sequence[EpisodeGroup], step: int) -> dict[str, float]:
    """Metrics of one batch.  Slow for thousands of rollouts; thread-safe."""
    return _samples(groups) | _by_task(groups) | _lags(groups, step) if groups else {}


def _by_task(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """`sample/groups`, and `_PER_TASK` of its groups, of each task of a mixture in the batch."""
    labels = {group.prompt.task for group in groups} - {""}
    metrics: dict[str, float] = {}
    for label in sorted(labels):
        mine = [group for group in groups if group.prompt.task == label]
        found = _samples(mine)
        metrics[f"sample/groups/{label}"] = float(len(mine))
        names = (*_PER_TASK, *_reward_parts(mine))
        metrics |= {f"{name}/{label}": found[name] for name in names}
    return metrics


def _samples(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    rollouts = [r for group in groups for r in group.rollouts()]
    rewards = [[e.score.reward for e in group.episodes if e.score] for group in groups]
    flat = [reward for group in rewards for reward in group]
    turns = [episode.turn_lengths() for group in groups for episode in group.episodes]
    lengths = [length for lengths in turns for length, _ in lengths]
    ends = [finish for lengths in turns for _, finish in lengths]
    segments = [len(r.versions) for r in rollouts]
    return _reward_parts(groups) | {
        "reward/mean": statistics.fmean(flat),
        "reward/std": statistics.pstdev(flat),
        "reward/zero_var_frac": statistics.fmean(len(set(group)) == 1 for group in rewards),
        "sample/length_mean": statistics.fmean(lengths),
        "sample/length_max": float(max(lengths)),
        "sample/truncated_frac": statistics.fmean(finish == Finish.LENGTH for finish in ends),
        "sample/turns_mean": statistics.fmean(len(lengths) for lengths in turns),
        "sample/rows_mean": len(rollouts) / len(turns),
        "sample/shared_frac": 1.0 - sum(r.num_tokens - 1 for r in rollouts) / _fed_apart(rollouts),
        "async/segments_mean": statistics.fmean(segments),
        "async/segments_max": float(max(segments)),
        "async/partial_frac": statistics.fmean(count > 1 for count in segments),
    }


def _reward_parts(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """Mean of each further number of a reward, over the episodes that have it."""
    found = defaultdict[str, list[float]](list)
    for score in (episode.score for group in groups for episode in group.episodes):
        for name, value in score.metrics.items() if score else ():
            found[f"reward/{name}"].append(value)
        for role, value in score.roles.items() if score else ():
            found[f"reward/{base_role(role)}"].append(value)
    return {name: statistics.fmean(found[name]) for name in sorted(found)}


def _fed_apart(rollouts: Sequence[Rollout]) -> int:
    """Tokens that a row per turn would feed in: of each turn, all tokens before its last one."""
    total = 0
    for rollout in rollouts:
        positions = np.flatnonzero(rollout.loss_mask)
        total += sum(int(positions[end.end - 1]) for end in rollout.ends)
    return total


def _lags(groups: Sequence[EpisodeGroup], step: int) -> dict[str, float]:
    lags: Counter[int] = Counter()
    for rollout in (r for group in groups for r in group.rollouts()):
        ends = [span.first for span in rollout.versions[1:]] + [rollout.num_sampled]
        for span, end in zip(rollout.versions, ends, strict=True):
            lags[step - span.version.step] += end - span.first
    total = sum(lags.values())
    return {
        f"async/lag_frac/{name}": sum(lags[lag] for lag in lags if low <= lag <= high) / total
        for name, (low, high) in LAGS.items()
    } | {
        "async/lag_min": float(min(lags)),
        "async/lag_mean": sum(lag * count for lag, count in lags.items()) / total,
        "async/lag_max": float(max(lags)),
    }


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """One finished optimizer step, for metrics.jsonl, the console and the report."""

    step: int
    version: PolicyVersion
    metrics: dict[str, float]
    samples: list[dict[str, object]]


def samples_of(
    config: Config,
    groups: Sequence[EpisodeGroup],
    step: int,
    decode: Callable[[Sequence[int]], str],
) -> list[dict[str, object]]:
    """One rollout of a step, of each task in turn, cut to the length that the report shows."""
    every = max(1, config.run.steps // max(1, config.observe.sample_rollouts))
    if not config.observe.sample_rollouts or step % every:
        return []
    first = {group.prompt.task: group for group in reversed(groups)}
    group = first[sorted(first)[step // every % len(first)]]
    episode = group.episodes[0]  # the first, not the best: the report shows a typical one
    rollout = [turn for turn in episode.turns if turn.fork_at < 0][-1].rollout
    plays = by_label(config)[group.prompt.task].kind.uses_chat
    begin = rollout.prompt_len if plays else len(group.prompt.token_ids)
    return [
        {
            "step": step,
            "version": str(rollout.versions[-1].version),
            "lag": step - rollout.oldest.step,
            **({"task": group.prompt.task} if group.prompt.task else {}),
            "episode": episode.episode_id,
            "prompt": group.prompt.text,
            **({"origin": str(group.prompt.origin)} if group.prompt.origin else {}),
            "response": decode(rollout.token_ids[begin:].tolist()),
            "turns": shown_turns(episode, decode),
            "graph": shown_graph(episode),
            "reward": episode.score.reward if episode.score else None,
            **({"roles": episode.score.roles} if episode.score and episode.score.roles else {}),
            **({"reason": episode.score.reason} if episode.score and episode.score.reason else {}),
            "group_mean": float(
                np.mean([e.score.reward for e in group.episodes if e.score is not None])
            ),
        }
    ]


Decode = Callable[[Sequence[int]], str]


def shown_turns(episode: Episode, decode: Decode) -> list[dict[str, object]]:
    """The trained turns in the order of the rows; read by `moerl.observe.episode_section`."""
    forks = iter(episode.score.forks if episode.score else ())
    found: list[dict[str, object]] = []
    before = 0  # sampled tokens of earlier rows
    for place, node in enumerate(episode.turns):
        more: dict[str, object] = {"role": node.role, "fork_at": node.fork_at}
        if node.fork_at >= 0:
            more["reward"] = next(forks, None)
        found += [turn | more for turn in _turns_of(episode, place, before, decode)]
        before += node.rollout.num_sampled
    return found


def shown_graph(episode: Episode) -> list[dict[str, object]]:
    """Every requested turn, trained or not; read by `moerl.observe.episode_section`."""
    return [
        {
            "name": turn.name,
            "parent": turn.parent,
            "role": turn.role,
            "left_out": turn.left_out,
            "versions": [str(version) for version in turn.versions],
            "tokens": turn.num_sampled,
            "tools": turn.tools,
            "fork_at": turn.fork_at,
        }
        for turn in episode.graph
    ]


def _turns_of(
    episode: Episode, place: int, before: int, decode: Decode
) -> Iterator[dict[str, object]]:
    node = episode.turns[place]
    row, sampled = node.rollout, np.flatnonzero(node.rollout.loss_mask)
    continues = node.parents[-1] if node.parents else 0 if node.fork_at >= 0 else None
    parent = None if continues is None else episode.turns[continues].rollout
    shared = shown = 0 if parent is None else min(_shared(row, parent), int(sampled[0]))
    begin = 0
    for number, end in enumerate(row.ends):
        first, stop = int(sampled[begin]), int(sampled[end.end - 1]) + 1
        yield {
            "row": place,
            "continues": continues,
            "shared_tokens": shared,
            "origin": node.origins[number] if number < len(node.origins) else "",
            "context": decode(row.token_ids[shown:first].tolist()),
            "context_tokens": first - shown,
            "answer": decode(row.token_ids[first:stop].tolist()),
            "pieces": _pieces(row, begin, end.end, first, decode),
            "steps": _steps(episode, before + begin, row.token_ids[first:stop], decode),
            "finish": end.finish.value,
        }
        shown, begin = stop, end.end


def _steps(episode: Episode, begin: int, said: Array, decode: Decode) -> list[dict[str, object]]:
    """The steps of a turn that sampled the tokens `said` of an episode, from `begin` on."""
    steps = episode.score.steps if episode.score else ()
    mine = [(end + 1 - begin, reward) for end, reward in steps if 0 <= end - begin < len(said)]
    edges = [0, *(end for end, _ in mine)]
    return [
        {"text": decode(said[start:end].tolist()), "reward": reward}
        for start, (end, reward) in zip(edges, mine, strict=False)
    ]


def _shared(row: Rollout, parent: Rollout) -> int:
    """Leading tokens that both rows have."""
    size = min(row.num_tokens, parent.num_tokens)
    differ = np.flatnonzero(row.token_ids[:size] != parent.token_ids[:size])
    return int(differ[0]) if len(differ) else size


def _pieces(
    row: Rollout, begin: int, end: int, first: int, decode: Decode
) -> list[dict[str, object]]:
    """Sampled tokens begin..end, the first of which is token `first` of the row, by version."""
    edges = [begin, *(span.first for span in row.versions if begin < span.first < end), end]
    spans = [[span for span in row.versions if span.first <= at][-1] for at in edges[:-1]]
    return [
        {
            "version": str(span.version),
            "kept_kv": span.kept_kv,
            "tokens": stop - at,
            "text": decode(row.token_ids[first + at - begin : first + stop - begin].tolist()),
        }
        for span, (at, stop) in zip(spans, pairwise(edges), strict=True)
    ]
