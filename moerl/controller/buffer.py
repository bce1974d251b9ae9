"""The bounded buffer of episode groups: which may start, which are ready, which are stale.

Admission is decided before generation, so that no started group is stale when it is trained.  With
B groups per step and selection in order, the group at buffer position p is trained at step
`next_step + p // B`; started under engine version e its lag is then `next_step + p // B - e`.
Bounding that by L = min(max_lag, depth) gives the capacity

    live < (L - (next_step - e) + 1) * B

(AReaL, arXiv 2505.24298, derives a capacity from an aggregate staleness bound; here positions are
counted).  Completion out of order can still make a group stale: it is checked again when a plan is
made, and a stale group is regenerated under its id, or trained without its stale siblings
(`rollout.stale_siblings`).

Without this bound (`rollout.admission: unbounded`) groups start as long as engines take them, and
stale groups are rejected when a plan is made.  Then at most `in_flight` + (max_lag + 1) * B groups
are live: of more ready groups the last would be stale at their turn, whatever their weights.

Ready groups that a step takes (`selection`):

    oldest    lowest ids first
    freshest  newest weights first; groups that become stale are regenerated
    strict    exactly the next ids; the step waits for ids that are still in generation

Late samples of a closed group become a group with a negative id (`carry`).  They are never
regenerated, but dropped when lost, stale or damaged.

Groups of planned steps, and trained groups that a restart could train again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count

from moerl.controller.journal.journal import Journal
from moerl.controller.journal.recovered_state import RecoveredState
from moerl.core.ids import IdSet, Ranges, ranges
from moerl.core.types import Episode, EpisodeGroup


class GroupBuffer:
    """Groups of one run by id: started, ready, consumed.  Ids are prompt indices."""

    def __init__(
        self,
        groups_per_step: int,
        max_lag: int,
        depth: int,
        *,
        selection: str = "oldest",
        in_flight: int | None = None,
    ) -> None:
        """Start empty.  in_flight: most groups in generation; None: admission is bounded."""
        self._in_flight = in_flight
        self.groups_per_step, self.max_lag, self.depth = groups_per_step, max_lag, depth
        self._select = _SELECTIONS[selection]
        self.next_step = 0  # step of the next plan
        self.dropped_stale = 0
        self.tries: dict[int, int] = {}  # tries so far, per group that is regenerated
        self._serial = count(1)
        self._cursor = 0  # first id that was never started
        self._again: list[int] = []  # ids to start again, ascending
        self._started: set[int] = set()
        self._ready: dict[int, EpisodeGroup] = {}
        self._admitted: dict[int, float] = {}  # monotonic seconds of admission, per ready group
        self._oldest: dict[int, int] = {}  # cache: oldest step of ready groups
        self.ages_s: list[float] = []  # seconds in buffer, per group of the last batch
        self._consumed = IdSet()

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def ready(self) -> list[EpisodeGroup]:
        """Finished groups by id, the order in which most selections train them."""
        return [self._ready[group_id] for group_id in sorted(self._ready)]

    @property
    def num_started(self) -> int:
        return len(self._started)

    @property
    def live(self) -> int:
        """Number of groups started or ready, not yet planned."""
        return len(self._started) + len(self._ready)

    def restart(
        self, next_step: int, consumed: Ranges, planned: Iterable[EpisodeGroup] = ()
    ) -> list[EpisodeGroup]:
        """Continue from a checkpoint in which exactly `consumed` are trained.

        planned: groups of steps after the checkpoint; they become ready again.  Other groups of
        such steps are regenerated.  Returns consumed groups that the buffer had as ready (after a
        journal lost its last rows).
        """
        spent = IdSet(consumed)
        self.next_step = next_step
        self._ready |= {group.group_id: group for group in planned}
        twice = [group for group_id, group in self._ready.items() if group_id in spent]
        for group in twice:
            self._remove(group.group_id)
        self._again = [group_id for group_id in self._again if group_id not in spent]
        void = self._consumed.without(consumed)  # ids from the cursor on start in their turn
        self._redo(one for one in void if one < self._cursor and one not in self._ready)
        self._consumed = spent
        return twice

    def restore(
        self,
        next_step: int,
        consumed: Iterable[int],
        dropped: Iterable[int],
        ready: Iterable[EpisodeGroup],
    ) -> None:
        """Restore an earlier controller's buffer; ids in none of these sets are regenerated."""
        self.next_step, self._consumed = next_step, IdSet(ids=consumed)
        self._ready = {group.group_id: group for group in ready}
        known = {*self._consumed, *dropped, *self._ready}
        self._cursor = max([-1, *known]) + 1
        self._again = sorted(set(range(self._cursor)) - known)

    def evict(self, is_bad: Callable[[EpisodeGroup], bool]) -> list[EpisodeGroup]:
        """Remove these groups; they are regenerated under their ids."""
        bad = [group for group in self._ready.values() if is_bad(group)]
        for group in bad:
            self._remove(group.group_id)
        self._redo(group.group_id for group in bad)
        return bad

    def capacity(self, engine_step: int) -> int:
        """Number of groups that may start now on an engine that serves `engine_step`."""
        lag = self.next_step - engine_step
        if self._in_flight is None:
            bound = (min(self.max_lag, self.depth) - lag + 1) * self.groups_per_step
        elif lag <= self.max_lag:
            bound = self._in_flight + (self.max_lag + 1) * self.groups_per_step
        else:
            bound = 0
        return max(0, bound - self.live)

    def start(self) -> int:
        """The next group id to generate."""
        if self._again:
            group_id = self._again.pop(0)
        else:
            while self._cursor in self._consumed:
                self._cursor += 1
            group_id, self._cursor = self._cursor, self._cursor + 1
        self._started.add(group_id)
        return group_id

    def carry(self, group_id: int) -> int | None:
        """Id for the late siblings of a started group; None if the group already has such an id."""
        late = ~group_id
        if group_id < 0 or any(late in ids for ids in (self._started, self._consumed, self._ready)):
            return None
        self._started.add(late)
        return late

    def new_try(self) -> int:
        """Number of another try of a rollout, unique among all tries."""
        return next(self._serial)

    def abandon(self, group_id: int) -> None:
        """A started group failed; it is regenerated."""
        self._started.discard(group_id)
        self._redo([group_id])

    def _redo(self, group_ids: Iterable[int]) -> None:
        group_ids = [one for one in group_ids if one >= 0]
        self.tries |= {group_id: next(self._serial) for group_id in group_ids}
        self._again = sorted([*self._again, *group_ids])

    def discard(self, group_id: int) -> None:
        """A started group is dropped for good; another one replaces it."""
        self._started.discard(group_id)

    def admit(self, group: EpisodeGroup) -> None:
        """Add a finished, checked and scored group."""
        assert group.group_id in self._started, f"group {group.group_id} was not started"
        self._started.discard(group.group_id)
        self._ready[group.group_id] = group
        self._admitted[group.group_id] = time.monotonic()

    def evict_stale(self) -> list[EpisodeGroup]:
        """Remove groups whose oldest token would exceed max_lag; they are regenerated."""
        stale = self.evict(lambda group: self.next_step - self._oldest_of(group) > self.max_lag)
        self.dropped_stale += len(stale)
        return stale

    def with_stale_siblings(self) -> list[tuple[EpisodeGroup, EpisodeGroup]]:
        """Ready groups with a sibling older than max_lag, each with the group that stays.

        The rewards of dropped siblings stay in the baseline (`EpisodeGroup.peers`).  Groups with
        too few other siblings (`fewest_siblings`) are left out: they are stale as a whole.
        """
        found = []
        for group in self.ready():
            if self.next_step - self._oldest_of(group) > self.max_lag:
                part = _without_older(group, self.next_step - self.max_lag)
                if len(part.episodes) >= fewest_siblings(group.group_id):
                    found.append((group, part))
        return found

    def exchange(self, group: EpisodeGroup) -> None:
        """Replace the ready group of this id, which has lost siblings."""
        self._ready[group.group_id] = group
        self._oldest.pop(group.group_id, None)

    def due(self) -> list[EpisodeGroup] | None:
        """The result that `pop` would return now."""
        chosen = self._select(self)
        if len(chosen) < self.groups_per_step:
            return None
        return [self._ready[group_id] for group_id in chosen]

    def pop(self) -> list[EpisodeGroup] | None:
        """groups_per_step ready groups by selection, ascending; None while there are too few."""
        if self.due() is None:
            return None
        chosen = self._select(self)
        self.next_step += 1
        self._consumed.update(chosen)
        now = time.monotonic()
        self.ages_s = [now - self._admitted.get(group_id, now) for group_id in chosen]
        return [self._remove(group_id) for group_id in chosen]

    def unplan(self, step: int, groups: list[EpisodeGroup]) -> None:
        """Undo `pop`: the batch of `step` is to be planned again."""
        self.next_step = step
        self._consumed = IdSet(ids=self._consumed.without(ranges(g.group_id for g in groups)))
        self._ready |= {group.group_id: group for group in groups}

    def _remove(self, group_id: int) -> EpisodeGroup:
        """Remove a ready group from the buffer."""
        self._admitted.pop(group_id, None)
        self._oldest.pop(group_id, None)
        return self._ready.pop(group_id)

    def _oldest_of(self, group: EpisodeGroup) -> int:
        """Oldest step of a ready group's tokens; cached, because every change needs all groups."""
        if group.group_id not in self._oldest:
            self._oldest[group.group_id] = group.oldest.step
        return self._oldest[group.group_id]

    def oldest(self) -> list[int]:
        return sorted(self._ready)[: self.groups_per_step]

    def freshest(self) -> list[int]:
        newest_first = sorted(
            self._ready.values(), key=lambda group: (-self._oldest_of(group), group.group_id)
        )
        return sorted(group.group_id for group in newest_first[: self.groups_per_step])

    def strict(self) -> list[int]:
        due = sorted([*self._ready, *self._started, *self._again])[: self.groups_per_step]
        return due if all(group_id in self._ready for group_id in due) else []


def fewest_siblings(group_id: int) -> int:
    """Siblings below which a group is not trained.

    A baseline needs two; the baseline of late siblings has the others' rewards.
    """
    return 2 if group_id >= 0 else 1


def _without_older(group: EpisodeGroup, step: int) -> EpisodeGroup:
    """The group without siblings that have a token of weights before `step`."""

    def is_old(episode: Episode) -> bool:
        return any(turn.rollout.oldest.step < step for turn in episode.turns)

    old = [episode for episode in group.episodes if is_old(episode)]
    rewards = [episode.score.reward for episode in old if episode.score is not None]
    kept = tuple(episode for episode in group.episodes if episode not in old)
    return replace(group, episodes=kept, peers=(*group.peers, *rewards))


_SELECTIONS = {
    "oldest": GroupBuffer.oldest,
    "freshest": GroupBuffer.freshest,
    "strict": GroupBuffer.strict,
}


class PlannedBatches:
    """Each change is journaled before the trainer is answered."""

    def __init__(self, journal: Journal, saved_steps: Callable[[], int]) -> None:
        self._journal, self._saved_steps = journal, saved_steps
        self.planned: dict[int, list[EpisodeGroup]] = {}
        self.trained: dict[int, EpisodeGroup] = {}  # trained after the newest checkpoint
        self.done = 0  # optimizer steps

    def restore(self, recovered: RecoveredState) -> None:
        """Restore the state of an earlier controller."""
        self.planned, self.done = recovered.planned, recovered.controller_state.done
        self.trained = {group.group_id: group for group in recovered.trained}

    def groups(self) -> Iterator[EpisodeGroup]:
        for groups in self.planned.values():
            yield from groups
        yield from self.trained.values()

    @property
    def num_ahead(self) -> int:
        """Number of groups that are planned for a step after the step in training."""
        return sum(len(groups) for step, groups in self.planned.items() if step > self.done)

    def restart(self, done: int, consumed: IdSet) -> tuple[list[EpisodeGroup], list[EpisodeGroup]]:
        """A trainer starts from a checkpoint of `done` steps, which consumed these groups.

        Returns the groups to train again, and those no longer needed.
        """
        again = [group for groups in self.planned.values() for group in groups]
        again += [group for group_id, group in self.trained.items() if group_id not in consumed]
        spent = [group for group_id, group in self.trained.items() if group_id in consumed]
        self.planned.clear()
        self.trained.clear()
        self.done = done
        return again, spent

    def plan(self, step: int, groups: list[EpisodeGroup]) -> None:
        """Raises JournalError; nothing is planned then."""
        self._journal.planned(step, [group.group_id for group in groups])
        self.planned[step] = groups

    def unplan(self, step: int) -> list[EpisodeGroup]:
        """The step is planned again; returns its groups, which are ready again."""
        self._journal.unplanned(group.group_id for group in self.planned[step])
        return self.planned.pop(step)

    def finish(self, step: int) -> list[EpisodeGroup]:
        """The step's groups are consumed; kept until a checkpoint contains the step.

        Returns groups that are no longer needed.  Raises JournalError; nothing is changed then.
        """
        saved, groups = self._saved_steps(), self.planned[step]
        kept = [group for group in groups if group.newest.step <= saved]
        self._journal.done(step, [group.group_id for group in kept])
        del self.planned[step]
        self.done = step + 1
        self.trained |= {group.group_id: group for group in kept}
        gone = [group for group in groups if group.group_id not in self.trained]
        for group_id in self._journal.saved(saved):
            if group := self.trained.pop(group_id, None):
                gone.append(group)
        return gone
