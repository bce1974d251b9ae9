"""Groups of planned steps, and trained groups that a restart could train again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moerl.controller.journal.journal import Journal
from moerl.controller.journal.recovered_state import RecoveredState
from moerl.core.ids import IdSet
from moerl.core.types import EpisodeGroup


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
