"""Which weights belong to the surviving history of a run whose trainer may start again.

A trainer that continues from the checkpoint of step s begins incarnation i there: versions of
earlier incarnations up to step s are in its past, later ones lie on a branch that was given up.
"""

from __future__ import annotations

from moerl.types import EpisodeGroup, PolicyVersion


class History:
    """The points at which incarnations began."""

    def __init__(self) -> None:
        self._begins: list[PolicyVersion] = []

    def begin(self, version: PolicyVersion) -> None:
        """A gang starts with these weights; saying so again changes nothing."""
        if version not in self._begins:
            self._begins.append(version)

    def knows(self, version: PolicyVersion, newest_step: int) -> bool:
        """Whether some gang may have published this version, given-up branches included."""
        return any(
            begin.incarnation == version.incarnation
            and begin.step <= version.step
            and (begin != self._begins[-1] or version.step <= newest_step)
            for begin in self._begins
        )

    def holds(self, version: PolicyVersion) -> bool:
        later = (b.step for b in self._begins if b.incarnation > version.incarnation)
        return all(version.step <= step for step in later)

    def holds_all(self, group: EpisodeGroup) -> bool:
        """Whether every token was sampled by weights of the surviving history."""
        return all(self.holds(span.version) for r in group.rollouts() for span in r.versions)
