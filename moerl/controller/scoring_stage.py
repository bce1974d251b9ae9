"""Checks finished groups, scores them, and admits them to the buffer or refuses them.

Only checked and scored groups enter the buffer.  A refused record is counted by its reason and its
group regenerated; a group that cannot be scored, or has no learning signal, is replaced by another.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from moerl.algorithms.selection import resample_correct
from moerl.config.task_kinds import TaskKind
from moerl.config.task_mixture import TaskEntry, by_label, naming
from moerl.controller.context import Context
from moerl.controller.journal.write_retry import WriteRetry
from moerl.core.errors import ConfigError, EngineError, JournalError, RecordError, ScoreError
from moerl.core.ids import without_life
from moerl.core.types import Episode, EpisodeGroup, Rollout, Score
from moerl.episodes.finished_episode import (
    FinishedEpisode,
    Retired,
    checked_graph,
    sealed_uris,
    used_uris,
)
from moerl.records.header_check import blob_uris, check, group_uris
from moerl.runtime import disk_wait
from moerl.runtime.disk_wait import DiskPatience

log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3  # refusals of one group before the run stops
_WINDOW = 64  # groups: the run stops when scoring failed for more than half of the last groups
_FIRST = 4  # and when it failed for each of the first groups: then a setting is wrong


class ScoringStage:
    """Checks, scores and admits groups; the only writer of the buffer."""

    def __init__(self, context: Context) -> None:
        services = context.services
        self._config, self._model = context.config, services.model
        self.scores = context.scores
        self._buffer, self._ref_counts = context.buffer, context.ref_counts
        self._lineage, self._journal = context.lineage, services.journal
        self._step_metrics, self._tasks = context.step_metrics, context.tasks
        self._scoring: dict[int, Sequence[FinishedEpisode]] = {}  # groups being checked and scored
        self._checking = asyncio.Lock()
        self._dropped = 0  # groups of equal rewards since the last plan
        self._equal_in_row = 0  # groups of equal rewards since the last group with a signal
        self._blobs, self._writes = services.blobs, WriteRetry(context.step_metrics)
        patience = DiskPatience(
            self._config.trainer.step_timeout_s / 2, context.step_metrics.notices.append
        )
        self._room = patience.begin("a rollout for cluster.blob_dir")
        self._entries = by_label(context.config)
        # Of the last groups of each task: with success
        self._scored: dict[str, deque[bool]] = {
            label: deque(maxlen=_WINDOW) for label in self._entries
        }
        self._attempts: dict[int, int] = {}
        self._rollout_attempts: Counter[str] = Counter()  # of groups in generation
        # Rewards of closed groups, once scored, for their late siblings.
        self._peers: dict[int, asyncio.Future[tuple[float, ...]]] = {}

    @property
    def finishing(self) -> int:
        """Number of groups being checked and scored."""
        return len(self._scoring)

    def episodes(self) -> Iterator[FinishedEpisode]:
        """Rollouts of the groups being checked and scored."""
        return (episode for group in self._scoring.values() for episode in group)

    def finish(
        self, group_id: int, episodes: Sequence[FinishedEpisode], later: int | None = None
    ) -> None:
        """Check, score and admit a group, in a task.  later: id of the group's late siblings."""
        if later is not None:
            self._peers[later] = asyncio.get_running_loop().create_future()
        self._room.done()
        self._scoring[group_id] = episodes
        for episode in episodes:
            del self._rollout_attempts[without_life(episode.episode_id)]
        self._tasks.spawn(self._finish(group_id, episodes))

    def planned(self) -> None:
        """A batch is complete: reset the count of groups dropped for equal rewards."""
        self._dropped = 0

    async def wait_for_room(self, error: RecordError) -> bool:
        """Whether records found no room and may find it now, after a pause."""
        if error.reason != "blob" or not self._room.again(str(error)):
            return False
        await asyncio.sleep(disk_wait.PAUSE_S)
        return True

    def refuse_one(self, group_id: int, rollout_id: str, error: RecordError) -> None:
        """Count the refusal of a rollout that is generated again; three in a row end the run."""
        self._step_metrics.add(f"refused/{error.reason}")
        log.warning("rollout %s: %s", rollout_id, error)
        episode = without_life(rollout_id)
        self._rollout_attempts[episode] += 1
        if self._rollout_attempts[episode] >= _MAX_ATTEMPTS:
            raise EngineError(
                f"a rollout of group {group_id} was refused {_MAX_ATTEMPTS} times; last: {error}"
            )

    def cancelled(self, group_id: int, episodes: Sequence[FinishedEpisode]) -> None:
        """A group in generation is too old: it is generated again, late siblings are not."""
        self._leave(group_id, episodes)
        self._retire(episodes, "dropped" if group_id < 0 else "played_again")
        if group_id < 0:
            self._buffer.discard(group_id)
        else:
            self._buffer.abandon(group_id)
        self._tasks.notify()

    def refuse(
        self, group_id: int, episodes: Sequence[FinishedEpisode], error: RecordError
    ) -> None:
        """Count the refusal and regenerate the group; three in a row end the run."""
        self._step_metrics.add(f"refused/{error.reason}")
        log.warning("group %d: %s", group_id, error)
        self._delete(episodes)
        self._leave(group_id, episodes)
        if group_id < 0:  # late siblings are not regenerated
            self._retire(episodes, "dropped")
            self._buffer.discard(group_id)
            self._tasks.notify()
            return
        self._regenerate(group_id, episodes, "was refused", error)

    def play_again(
        self,
        group_id: int,
        episodes: Sequence[FinishedEpisode],
        error: ScoreError,
        *,
        counts: bool,
    ) -> None:
        """Replay a group whose player died; three deaths in a row end the run if `counts`."""
        log.warning("group %d is played again: %s", group_id, error)
        self._delete(episodes)
        if counts:
            self._regenerate(group_id, episodes, "could not be played", error)
            return
        self._retire(episodes, "played_again")
        self._buffer.abandon(group_id)
        self._tasks.notify()

    def _regenerate(
        self, group_id: int, episodes: Sequence[FinishedEpisode], what: str, error: Exception
    ) -> None:
        self._retire(episodes, "played_again")
        self._attempts[group_id] = self._attempts.get(group_id, 0) + 1
        if self._attempts[group_id] >= _MAX_ATTEMPTS:
            raise EngineError(f"group {group_id} {what} {_MAX_ATTEMPTS} times; last: {error}")
        self._buffer.abandon(group_id)
        self._tasks.notify()

    def drop_branch(self, group: EpisodeGroup) -> None:
        """Drop a group with tokens of a discarded branch of weights."""
        self._step_metrics.add("async/dropped_branch_groups")
        self._ref_counts.forget(group)

    async def _finish(self, group_id: int, episodes: Sequence[FinishedEpisode]) -> None:
        try:
            await self._check_and_score(group_id, episodes)
        finally:
            del self._scoring[group_id]
            self._tasks.notify()

    async def _check_and_score(self, group_id: int, episodes: Sequence[FinishedEpisode]) -> None:
        try:
            async with self._checking:
                await asyncio.sleep(0)  # one group per turn of the loop: others have work there too
                checked = [
                    self._checked(f"{group_id}.{i}", episode) for i, episode in enumerate(episodes)
                ]
        except RecordError as error:
            self.refuse(group_id, episodes, error)
            return
        prompt = episodes[0].prompt
        self._step_metrics.add(
            "sample/context_ends", sum(episode.lacks_context for episode in episodes)
        )
        self._ref_counts.release(sealed_uris(episodes) - used_uris(episodes))
        try:
            scores = await self.scores.score(episodes)
        except ScoreError as error:
            self.drop_unscored(group_id, episodes, error)
            return
        self._scored[prompt.task].append(True)
        peers = await self._swap(group_id, tuple(score.reward for score in scores))
        signals = {signal for score in scores for signal in _signals(score)}
        if self._drops_equal(signals.union((one,) for one in peers)):
            self._discard(group_id, episodes)
            return
        scored = [replace(one, score=score) for one, score in zip(checked, scores, strict=True)]
        group = EpisodeGroup(group_id, prompt, self._resampled(group_id, scored), peers)
        try:
            is_admitted = await self._admit(group)
            kept = {episode.episode_id for episode in group.episodes}
            pairs = list(zip(checked, episodes, strict=True))
            chosen = [episode for one, episode in pairs if one.episode_id in kept]
            others = [episode for one, episode in pairs if one.episode_id not in kept]
            self._retire(chosen, "admitted" if is_admitted else "played_again")
            if others:  # of an oversampled group
                self._retire(others, "dropped")
        except RecordError as error:
            self.refuse(group_id, episodes, error)

    async def _swap(self, group_id: int, rewards: tuple[float, ...]) -> tuple[float, ...]:
        """Pass rewards between a group and its late siblings; returns the others' rewards."""
        if group_id in self._peers:
            peers = await self._peers[group_id]
            self._peers.pop(group_id, None)
            return peers
        if (waiting := self._peers.get(~group_id)) and not waiting.done():
            waiting.set_result(rewards)
        return ()

    def _leave(self, group_id: int, episodes: Sequence[FinishedEpisode]) -> None:
        """A group is not admitted: its late siblings get no rewards; late siblings are dropped."""
        if group_id < 0:
            self._step_metrics.add("async/dropped_siblings", len(episodes))
            self._peers.pop(group_id, None)
        elif (waiting := self._peers.get(~group_id)) and not waiting.done():
            waiting.set_result(())

    async def _admit(self, group: EpisodeGroup) -> bool:
        """Write to the journal, then to the buffer; repeated while the disk is full.

        False: its weights were discarded meanwhile, and the group is played again.
        Raises RecordError when the blobs to copy are lost.
        """
        while not await self._is_written(group):
            await asyncio.sleep(disk_wait.PAUSE_S)
        self._attempts.pop(group.group_id, None)
        if self._lineage.in_lineage(group):
            self._buffer.admit(group)
            return True
        self._journal.left([group.group_id])
        self.drop_branch(group)
        self._buffer.abandon(group.group_id)
        return False

    async def _is_written(self, group: EpisodeGroup) -> bool:
        """False: the disk is full.  Nothing else runs between the journal and the return."""
        try:
            if self._journal.is_shared:
                await asyncio.to_thread(self._journal.share, group)
            if self._lineage.in_lineage(group):
                self._journal.admitted(group)
        except JournalError as error:
            self._writes.failed(f"group {group.group_id}", error)
            if await asyncio.to_thread(self._blobs.missing, group_uris(group)):
                raise RecordError("blob", f"group {group.group_id}: {error}") from error
            return False
        return True

    def _checked(self, episode_id: str, episode: FinishedEpisode) -> Episode:
        """Rows and graph of an episode.  Raises RecordError."""
        nodes = episode.nodes(self._config.rollout.turn_rows)
        for node in nodes:
            self._check(node.rollout)
        return Episode(episode_id, nodes, graph=checked_graph(episode, nodes))

    def _check(self, rollout: Rollout) -> None:
        check(rollout, self._model, routing=self._config.replay.routing == "R3")
        for span in rollout.versions:
            if not self._lineage.knows(span.version, self._buffer.next_step):
                raise RecordError(
                    "version",
                    f"{rollout.rollout_id}: tokens of {span.version}, which was never published",
                )

    def drop_unscored(
        self, group_id: int, episodes: Sequence[FinishedEpisode], error: ScoreError
    ) -> None:
        """Replace the group; ends the run if so configured, and if scoring does not work at all."""
        task = self._entries[episodes[0].prompt.task]
        self._scored[task.label].append(False)
        problem = _does_not_work(self._scored[task.label])
        if task.on_score_error == "stop" or problem:
            why = f"{problem}; last: {error}" if problem else str(error)
            with naming(task):
                raise ConfigError(*_source_of_rewards(task), why) from error
        self._step_metrics.add("scorer/failed")
        log.warning("group %d is dropped: %s", group_id, error)
        self._discard(group_id, episodes)

    def _drops_equal(self, rewards: Collection[tuple[float, ...]]) -> bool:
        """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): drop groups of equal rewards.

        The number per batch is bounded, so that a solved or hopeless task does not stop the run.
        """
        rollout = self._config.rollout
        if not rollout.drop_zero_variance:
            return False
        if len(set(rewards)) > 1:
            self._equal_in_row = 0
            return False
        ((reward, *_),) = set(rewards)
        self._say_equal(reward)
        if self._dropped >= rollout.max_drop_batches * rollout.groups_per_step:
            return False
        self._dropped += 1
        self._step_metrics.add("async/dropped_zero_variance_groups")
        return True

    def _say_equal(self, reward: float) -> None:
        """Say that no group has a signal: after a batch of them, and at each doubling."""
        self._equal_in_row += 1
        batches, rest = divmod(self._equal_in_row, self._config.rollout.groups_per_step)
        if rest or batches & (batches - 1):
            return
        notice = (
            f"the last {self._equal_in_row} groups had equal rewards each (now {reward:g}): "
            "rollout.drop_zero_variance finds nothing to train; check task.reward and the answers "
            "of the data"
        )
        log.warning(notice)
        self._step_metrics.notices.append(notice)

    def _resampled(self, group_id: int, episodes: list[Episode]) -> tuple[Episode, ...]:
        """The episodes of an oversampled group that are trained (GRPO-RoC, arXiv 2508.20722)."""
        size = self._config.rollout.group_size
        if len(episodes) <= size:
            return tuple(episodes)
        scores = [episode.score for episode in episodes if episode.score is not None]
        kept = resample_correct(
            [score.reward for score in scores],
            [score.errors for score in scores],
            size,
            random.Random(f"{self._config.run.seed}/{group_id}"),
        )
        chosen = [episodes[index] for index in kept]
        every, stays = (
            blob_uris(*(turn.rollout for episode in some for turn in episode.turns))
            for some in (episodes, chosen)
        )
        self._ref_counts.release(every - stays)  # siblings share the rows of their prompt
        return tuple(chosen)

    def _discard(self, group_id: int, episodes: Sequence[FinishedEpisode]) -> None:
        self._delete(episodes)
        self._leave(group_id, episodes)
        self._attempts.pop(group_id, None)
        self._journal.dropped(group_id)
        self._retire(episodes, "dropped")
        self._buffer.discard(group_id)

    def _retire(self, episodes: Sequence[FinishedEpisode], how: Retired) -> None:
        """Episodes have ended in any way: the log of their turns is not needed."""
        self._ref_counts.release(self._journal.turns.end(one.episode_id for one in episodes))
        for episode in episodes:
            self.scores.forget(episode.episode_id)
            episode.on_retired(how)

    def _delete(self, episodes: Sequence[FinishedEpisode]) -> None:
        self._ref_counts.release(sealed_uris(episodes))


def _signals(score: Score) -> list[tuple[float, ...]]:
    """Values in which siblings must differ: rewards of the episode, its roles and its forks."""
    own = (score.reward, *(score.roles[role] for role in sorted(score.roles)))
    return [own, *((reward,) for reward in score.forks)]


def _source_of_rewards(task: TaskEntry) -> tuple[str, object]:
    """Name and value of the setting from which the rewards of a task come."""
    if task.rewards:
        return "task.rewards", [term.name for term in task.rewards]
    if not task.brings_reward:
        return "task.reward", task.reward or task.name
    if task.agent.port:
        return "task.agent.port", task.agent.port
    if task.kind is TaskKind.PROGRAM:
        return "task.agent.command", task.agent.command
    return "task.environment", task.environment


def _does_not_work(scored: Sequence[bool]) -> str:
    """Why the failures of a task have a common cause; "" if single answers may have caused them."""
    failed = scored.count(False)
    if failed == len(scored) >= _FIRST:
        return f"none of the first {failed} groups could be scored"
    if 2 * failed > _WINDOW:
        return f"{failed} of the last {_WINDOW} groups could not be scored"
    return ""
