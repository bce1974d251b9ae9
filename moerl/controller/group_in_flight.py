"""The siblings of one prompt that are being played, and the blobs that they share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from moerl.controller.blob_ref_counts import BlobRefCounts
from moerl.core.types import Prompt
from moerl.episodes.finished_episode import ENDED, FinishedEpisode, RecordedTurn
from moerl.episodes.open_episode import Home, OpenEpisode


class GroupInFlight:
    """Used by one event loop."""

    def __init__(
        self, group_id: int, prompt: Prompt, home: Home, episodes: Sequence[OpenEpisode]
    ) -> None:
        self.group_id, self.prompt, self.home = group_id, prompt, home
        self.episodes = list(episodes)  # by sibling; a refused episode is replaced by its next try
        self.ended: dict[str, FinishedEpisode] = {}  # by name
        self.is_stale = False  # it is being cancelled
        self.is_closed = False
        self._released: set[str] = set()  # blobs that were released, or are kept, at its close
        # Rows of the prompt that a running sibling may refer to, kept until each has replied
        self._leased: set[str] = set()
        self._dropped: dict[str, OpenEpisode] = {}  # by name, until their blobs are released
        self._playing: set[str] = set()  # names of dropped episodes that have not ended

    @property
    def running(self) -> list[OpenEpisode]:
        return [episode for episode in self.episodes if episode.name not in self.ended]

    @property
    def finished(self) -> list[FinishedEpisode]:
        """The episodes that have ended, by sibling, with blobs that came behind their end."""
        found = []
        for episode in self.episodes:
            if (ended := self.ended.get(episode.name)) is not None:
                came_late = len(episode.uris) > len(ended.uris)
                found.append(replace(ended, uris=frozenset(episode.uris)) if came_late else ended)
        return found

    @property
    def failed(self) -> list[FinishedEpisode]:
        """Episodes that failed on their own, by sibling."""
        ended = (self.ended.get(episode.name) for episode in self.episodes)
        return [one for one in ended if one is not None and one.failure not in ("", ENDED)]

    @property
    def goes_on(self) -> bool:
        """Whether a sibling is worth another try."""
        return not (self.is_stale or self.is_closed or self.failed)

    def exchange(self, episode: OpenEpisode, other: OpenEpisode) -> None:
        """A sibling is played again."""
        self.episodes[self.episodes.index(episode)] = other

    def older_than(self, step: int, *, runs_through_updates: bool) -> list[OpenEpisode]:
        """Siblings with a token of weights before `step`; see `OpenEpisode.oldest_step`."""
        found = []
        for episode in self.episodes:
            oldest = episode.oldest_step(runs_through_updates=runs_through_updates)
            if oldest is not None and oldest < step:
                found.append(episode)
        return found

    # --- siblings that are too old ----------------------------------------------------------------
    def drop(self, episode: OpenEpisode) -> None:
        """The group continues without a running sibling, which the caller ends."""
        self.episodes.remove(episode)
        self._dropped[episode.name] = episode
        self._playing.add(episode.name)

    @property
    def waits_for_dropped(self) -> bool:
        """Whether a dropped sibling has not ended."""
        return bool(self._playing)

    def is_dropped(self, name: str) -> bool:
        """Whether an episode that has not ended was dropped."""
        return name in self._playing

    def dropped_ended(self, name: str) -> None:
        """A dropped sibling has ended; its blobs fall when no sibling may refer to them."""
        self._playing.remove(name)

    # --- blobs ------------------------------------------------------------------------------------
    def close(self, ref_counts: BlobRefCounts) -> None:
        """Release the blobs of late siblings, which are not wanted."""
        self.release()
        late = [*self.running, *self._dropped.values()]
        if not (late or self._leased):
            return
        kept = _uris(episode for episode in self.episodes if episode.name in self.ended)
        theirs = _uris(late) | self._leased
        self._released = kept | theirs
        ref_counts.release(theirs - kept)

    def release(self) -> None:
        """The scoring stage has the blobs of its episodes."""
        for episode in (*self.episodes, *self._dropped.values()):
            episode.is_released = True

    def carry(self, later: int, ref_counts: BlobRefCounts) -> None:
        """Go on with the late siblings, under another id."""
        ended = self.finished
        running = self.running
        for episode in self.episodes:
            episode.is_released = episode not in running
        self.group_id, self.episodes, self.ended = later, running, {}
        kept, theirs = _uris(ended), _uris([*self.episodes, *self._dropped.values()])
        ref_counts.share(theirs & kept)
        self._leased |= (leased := _prompt_uris(ended) - theirs)
        ref_counts.share(leased)
        self.settle(ref_counts)

    def drop_late(self, episode: FinishedEpisode, ref_counts: BlobRefCounts) -> None:
        """A late or dropped sibling of a closed group has ended."""
        ref_counts.release(episode.uris - self._released)

    def settle(self, ref_counts: BlobRefCounts) -> None:
        """Release leased rows and blobs of dropped siblings, unless a sibling refers to them.

        Call after each end of a sibling.  A sibling without a reply may yet refer to any of them.
        """
        if not (self._leased or self._dropped):
            return
        if self._playing or any(not episode.num_sampled for episode in self.running):
            return
        for episode in self._dropped.values():
            episode.is_released = True
        unused = self._leased | _uris(self._dropped.values())
        self._leased, self._dropped = set(), {}
        ref_counts.release(unused - _uris(self.episodes))


def _uris(episodes: Iterable[OpenEpisode | FinishedEpisode]) -> set[str]:
    return set[str]().union(*(episode.uris for episode in episodes))


def _prompt_uris(episodes: Iterable[FinishedEpisode]) -> set[str]:
    """Blobs with rows of a prompt that siblings may share."""
    firsts: list[RecordedTurn] = [turn for episode in episodes for turn in episode.turns[:1]]
    rows = (turn.sampled.segments[0].prompt_rows for turn in firsts)
    return {part.ids.uri for part in rows if part is not None}
