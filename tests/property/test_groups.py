"""Siblings that end, come late or are dropped: a needed blob is there, and no blob stays."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moerl.controller.blob_ref_counts import BlobRefCounts
from moerl.controller.group_in_flight import GroupInFlight
from moerl.core.types import Prompt
from tests.helpers.state_machines import explore


@dataclass(eq=False)
class Sibling:
    """An open episode, as far as its group looks at it."""

    name: str
    group: GroupInFlight | None = None
    uris: set[str] = field(default_factory=set)
    num_sampled: int = 0
    is_released: bool = False
    has_ended: bool = False


@dataclass
class Ended:
    uris: frozenset[str]
    turns: list[Any]
    failure: str = ""


class Blobs:
    """A store of names; each is deleted once."""

    def __init__(self) -> None:
        self.uris: set[str] = set()

    def delete(self, uri: str) -> None:
        self.uris.remove(uri)


class Groups(RuleBasedStateMachine):
    """Model: the blobs that running siblings and finished groups need."""

    @initialize(quorum=st.integers(1, 3), carries=st.booleans())
    def begin(self, quorum: int, carries: bool) -> None:
        self.quorum, self.carries = quorum, carries
        self.store: Any = Blobs()
        self.counts = BlobRefCounts(self.store)
        self.siblings: list[Sibling] = []  # all that may still get a reply
        self.groups: list[GroupInFlight] = []  # open
        self.batches: list[set[str]] = []  # blobs of groups in the buffer
        self.count = 0

    def teardown(self) -> None:
        """Whatever happened: once all have ended and are trained, no blob is left."""
        for one in self.playing():
            self.end_one(one)
        for _ in list(self.batches):
            self.forget(0)
        assert self.store.uris == set(), "blobs stay for ever"

    def seal(self, name: str) -> str:
        self.count += 1
        self.store.uris.add(uri := f"{name}-{self.count}")
        return uri

    def playing(self) -> list[Sibling]:
        return [one for one in self.siblings if not one.has_ended]

    # --- rules ------------------------------------------------------------------------------------
    @precondition(lambda self: len(self.groups) < 2)
    @rule(siblings=st.integers(2, 4))
    def start(self, siblings: int) -> None:
        number = self.count = self.count + 1
        made: Any = [Sibling(f"{number}.{i}") for i in range(siblings)]
        home: Any = None
        group = GroupInFlight(number, Prompt(number, (1,), "", None, {}), home, made)
        for one in made:
            one.group = group
        self.siblings += made
        self.groups.append(group)

    @precondition(lambda self: self.playing())
    @rule(first=st.integers(0, 9), count=st.integers(1, 3))
    def reply(self, first: int, count: int) -> None:
        """One engine call: first replies of siblings share the rows of their prompt."""
        playing = self.playing()
        group = playing[first % len(playing)].group
        asked = [one for one in playing if one.group is group][:count]
        for one in asked:
            if one.is_released:
                continue  # its request was withdrawn
            if not one.num_sampled:
                one.uris.add(self.prompt_rows(one))
            one.uris.add(self.seal(one.name))
            one.num_sampled += 4

    def prompt_rows(self, one: Sibling) -> str:
        """The first reply has the rows; replies behind it refer to them."""
        name = f"prompt-{one.name.split('.')[0]}"
        if name not in self.store.uris:
            group = one.group
            assert group is not None
            replied = [s for s in self.siblings if s.group is group and s.num_sampled]
            assert not replied, "rows that a sibling refers to are deleted"
            self.store.uris.add(name)
        return name

    @precondition(lambda self: self.siblings)
    @rule(pick=st.integers(0, 9))
    def late_reply(self, pick: int) -> None:
        """Of a turn that was withdrawn, as the router takes it."""
        one = self.siblings[pick % len(self.siblings)]
        if not one.num_sampled:
            return
        uri = self.seal(f"{one.name}-late")
        if one.is_released:
            self.counts.release({uri})
        elif not one.has_ended or not self.is_dropped(one):
            one.uris.add(uri)
        else:
            self.counts.release({uri})

    def is_dropped(self, one: Sibling) -> bool:
        assert one.group is not None
        return one not in one.group.episodes

    @precondition(lambda self: self.playing())
    @rule(pick=st.integers(0, 9))
    def end(self, pick: int) -> None:
        self.end_one(self.playing()[pick % len(self.playing())])

    def end_one(self, one: Sibling) -> None:
        """As the producer does when an episode ends."""
        group = one.group
        assert group is not None
        one.has_ended = True
        rows = (SimpleNamespace(ids=SimpleNamespace(uri=u)) for u in one.uris if "prompt" in u)
        segment = SimpleNamespace(prompt_rows=next(rows, None))
        turn = SimpleNamespace(sampled=SimpleNamespace(segments=[segment]))
        ended: Any = Ended(frozenset(one.uris), [turn])
        if is_dropped := group.is_dropped(one.name):
            group.dropped_ended(one.name)
        if group.is_closed:
            group.drop_late(ended, self.counts)
            return
        if not is_dropped:
            group.ended[one.name] = ended
        group.settle(self.counts)
        if not is_dropped:
            self.close_if_due(group)

    def close_if_due(self, group: GroupInFlight) -> None:
        wanted = self.quorum if group.group_id >= 0 else len(group.episodes)
        if len(group.ended) < min(wanted, len(group.episodes)):
            return
        self.batches.append(set[str]().union(*(one.uris for one in group.finished)))
        if self.carries and group.running and group.group_id >= 0:
            group.carry(~group.group_id, self.counts)
            return
        group.close(self.counts)
        group.is_closed = True
        group.release()
        self.groups.remove(group)

    @precondition(lambda self: self.groups)
    @rule(pick=st.integers(0, 9))
    def drop(self, pick: int) -> None:
        """A sibling is too old; its episode ends later."""
        group = self.groups[pick % len(self.groups)]
        if len(group.running) > 1:
            group.drop(group.running[pick % len(group.running)])

    @precondition(lambda self: self.batches)
    @rule(pick=st.integers(0, 9))
    def forget(self, pick: int) -> None:
        """A group is trained, or leaves the buffer otherwise."""
        self.counts.release(self.batches.pop(pick % len(self.batches)))

    # --- always -----------------------------------------------------------------------------------
    @invariant()
    def nothing_needed_is_deleted(self) -> None:
        needed = set[str]().union(*self.batches)
        for group in self.groups:
            needed |= set[str]().union(*(one.uris for one in group.episodes))
        assert needed <= self.store.uris, f"{needed - self.store.uris} are deleted"


def test_any_history() -> None:
    explore(Groups, 150, 40)
