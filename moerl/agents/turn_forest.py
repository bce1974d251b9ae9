"""The recorded turns of an episode, and the turn that a request continues.

Turns form a forest: the prompt of a child begins with the tokens of its parent.  A request names no
parent.  It is recognised by its messages: the deepest recorded turn wins whose request and answer
are the first messages of this one.  A history that no recorded turn begins is a new root.

A digest runs over the keys of the messages, so that a request of n messages takes n look-ups.  The
tools are in the first digest: a template writes them before the first message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b

import numpy as np

from moerl.agents.chat_messages import ChatMessage, Json, tools_key
from moerl.controller.turn_rows import SampledTurn, join
from moerl.types import Array, Episode, Rollout, Turn


class Origin(StrEnum):
    """How the request of a turn relates to the turns before it."""

    FIRST = "first"  # the first request of the episode
    CONTINUED = "continued"  # the first that continues its parent
    BRANCHED = "branched"  # its parent was continued before, in another way
    REPEATED = "repeated"  # the same messages as an earlier request: a retry, or n above 1
    REWRITTEN = "rewritten"  # holds answers that the policy did not give in this form
    TOOLS_CHANGED = "tools_changed"  # a recorded conversation with other tools
    NEW = "new"  # another conversation without an answer: a sub-agent, a summary


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTurn:
    """A finished turn.  Its prompt begins with `inherited` tokens of its parent.

    These are all tokens of the parent, or all but its last one: a stop token that the template
    replaces by another.  sampled: what its own calls delivered; rollout: its row, with the rows of
    the turns whose tokens it begins with.
    """

    index: int
    parent: int | None
    inherited: int
    origin: Origin
    sampled: SampledTurn
    rollout: Rollout
    text: str = ""  # prompt and answer, of a turn that was asked for as text


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A request as the forest recognises it.

    covered: number of its messages, or of its characters, that the parent holds.
    digests: of all its messages, with the tools and without.
    """

    parent: RecordedTurn | None
    covered: int
    origin: Origin
    digests: tuple[bytes, bytes]
    text: str = ""


class TurnForest:
    """The turns of one episode, in the order in which they ended."""

    def __init__(self) -> None:
        self.turns: list[RecordedTurn] = []
        self._answers: dict[bytes, RecordedTurn] = {}  # by digest up to the answer; the newest
        self._answers_any_tools: set[bytes] = set()
        self._seen: set[bytes] = set()  # requests
        self._continued: Counter[int] = Counter()  # requests that continue a turn

    def match(self, messages: Sequence[ChatMessage], tools: Sequence[Json]) -> TurnRequest:
        """Recognise a request."""
        begins = blake2b(tools_key(tools), digest_size=16).digest(), b""
        chains = [_chain(begin, messages) for begin in begins]
        whole, plain = chains
        found = [place for place, digest in enumerate(whole) if digest in self._answers]
        covered = found[-1] if found else 0
        parent = self._answers[whole[covered]] if found else None
        if parent is None and self._answers_any_tools.intersection(plain):
            origin = Origin.TOOLS_CHANGED
        elif any(message.role == "assistant" for message in messages[covered:]):
            origin = Origin.REWRITTEN
        else:
            origin = self._place_of(parent)
        return TurnRequest(parent, covered, origin, (whole[-1], plain[-1]))

    def match_text(self, prompt: str) -> TurnRequest:
        """The deepest turn whose prompt and answer begin this text."""
        fits = [turn for turn in self.turns if turn.text and prompt.startswith(turn.text)]
        parent = max(fits, key=lambda turn: (len(turn.text), turn.index), default=None)
        covered = len(parent.text) if parent else 0
        digest = _next(b"text", prompt.encode(errors="surrogatepass"))
        return TurnRequest(parent, covered, self._place_of(parent), (digest, digest), prompt)

    def match_tokens(self, ids: Array) -> TurnRequest:
        """The deepest turn whose tokens begin these."""
        fits = [turn for turn in self.turns if _begins(ids, turn.rollout.token_ids)]
        parent = max(fits, key=lambda turn: (turn.rollout.num_tokens, turn.index), default=None)
        digest = _next(b"tokens", np.asarray(ids, np.int32).tobytes())
        return TurnRequest(parent, 0, self._place_of(parent), (digest, digest))

    def begin(self, request: TurnRequest) -> TurnRequest:
        """A turn of this request begins; an equal request after it is `repeated`."""
        if request.parent is not None:
            self._continued[request.parent.index] += 1
        if request.digests[0] in self._seen:
            return replace(request, origin=Origin.REPEATED)
        self._seen.add(request.digests[0])
        return request

    def chain(self, parent: RecordedTurn | None, inherited: int) -> list[SampledTurn]:
        """The turns whose routing rows a turn need not deliver again, oldest first, untrained.

        None, where it does not begin with all tokens of its parent.
        """
        found: list[SampledTurn] = []
        while parent is not None and inherited == parent.rollout.num_tokens:
            found.append(replace(parent.sampled, trained=False))
            inherited = parent.inherited
            parent = None if parent.parent is None else self.turns[parent.parent]
        return found[::-1]

    def add(
        self, request: TurnRequest, answer: ChatMessage | str, name: str, sampled: SampledTurn,
        inherited: int,
    ) -> RecordedTurn:  # fmt: skip
        """answer: as the client sees it; or text, where text was asked for.

        Raises RecordError when the turn does not continue its parent.
        """
        parent, text = request.parent, ""
        if isinstance(answer, str):
            text = request.text + answer if request.text else ""
        turn = RecordedTurn(
            index=len(self.turns),
            parent=None if parent is None else parent.index,
            inherited=inherited,
            origin=request.origin,
            sampled=sampled,
            rollout=join(name, [*self.chain(parent, inherited), sampled]),
            text=text,
        )
        self.turns.append(turn)
        if isinstance(answer, ChatMessage):
            with_tools, plain = (_next(digest, answer.key) for digest in request.digests)
            self._answers[with_tools] = turn
            self._answers_any_tools.add(plain)
        return turn

    def episode(self, episode_id: str) -> Episode:
        """The turns with their parents, as the controller takes episodes."""
        return Episode(
            episode_id,
            tuple(
                Turn(turn.rollout, () if turn.parent is None else (turn.parent,))
                for turn in self.turns
            ),
        )

    def _place_of(self, parent: RecordedTurn | None) -> Origin:
        if parent is None:
            return Origin.NEW if self._seen else Origin.FIRST
        return Origin.BRANCHED if self._continued[parent.index] else Origin.CONTINUED


def _chain(begin: bytes, messages: Sequence[ChatMessage]) -> list[bytes]:
    """Digests of the first 0, 1, ... messages."""
    digests = [begin]
    for message in messages:
        digests.append(_next(digests[-1], message.key))
    return digests


def _next(digest: bytes, key: bytes) -> bytes:
    return blake2b(digest + b"\0" + key, digest_size=16).digest()


def _begins(ids: Array, prefix: Array) -> bool:
    return len(prefix) <= len(ids) and bool(np.array_equal(ids[: len(prefix)], prefix))
