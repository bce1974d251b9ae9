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
from moerl.controller.turn_rows import SampledTurn, SharedIds, join
from moerl.core.errors import RecordError
from moerl.core.types import Array, Rollout


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
    replaces by another.  sampled: what its own calls delivered.
    """

    index: int
    before: RecordedTurn | None
    inherited: int
    origin: Origin
    name: str
    sampled: SampledTurn
    ids: SharedIds
    num_tokens: int

    @property
    def parent(self) -> int | None:
        return None if self.before is None else self.before.index

    @property
    def token_ids(self) -> Array:
        """The conversation at its end."""
        return self.ids.first(self.num_tokens)

    @property
    def continues(self) -> bool:
        """Whether its prompt begins with all tokens of its parent."""
        return self.before is not None and self.inherited == self.before.num_tokens

    @property
    def rollout(self) -> Rollout:
        """Its row, with the rows of the turns whose tokens it begins with.

        It is as long as the conversation and made at each call.
        """
        return join(self.name, [*self._chain(), self.sampled])

    def _chain(self) -> list[SampledTurn]:
        """The turns whose routing rows it need not deliver again, oldest first, untrained."""
        found: list[SampledTurn] = []
        turn: RecordedTurn | None = self
        while turn is not None and turn.continues:
            turn = turn.before
            assert turn is not None
            found.append(replace(turn.sampled, trained=False))
        return found[::-1]


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
        self._texts: dict[tuple[int, bytes], RecordedTurn] = {}  # by length and digest; the newest
        self._seen: set[bytes] = set()  # requests
        self._continued: Counter[int] = Counter()  # requests that continue a turn

    def match(self, messages: Sequence[ChatMessage], tools: Sequence[Json]) -> TurnRequest:
        """Recognise a request."""
        begins = blake2b(tools_key(tools), digest_size=16).digest(), b""
        keys = [message.key for message in messages]
        chains = [_chain(begin, keys) for begin in begins]
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
        parent, covered, begin, running = None, 0, 0, blake2b(digest_size=16)
        for end in sorted({length for length, _ in self._texts if length <= len(prompt)}):
            running.update(_bytes(prompt[begin:end]))
            begin = end
            if (found := self._texts.get((end, running.digest()))) is not None:
                parent, covered = found, end
        digest = _next(b"text", _bytes(prompt))
        return TurnRequest(parent, covered, self._place_of(parent), (digest, digest), prompt)

    def match_tokens(self, ids: Array) -> TurnRequest:
        """The deepest turn whose tokens begin these."""
        deepest_first = sorted(self.turns, key=lambda turn: (-turn.num_tokens, -turn.index))
        parent = next((turn for turn in deepest_first if _begins(ids, turn.token_ids)), None)
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

    def add(
        self, request: TurnRequest, answer: ChatMessage | str, name: str, sampled: SampledTurn,
        inherited: int,
    ) -> RecordedTurn:  # fmt: skip
        """answer: as the client sees it; or text, where text was asked for.

        Raises RecordError when the turn does not continue its parent.
        """
        ids = _extended(request.parent, inherited, sampled)
        prompt_ids = ids.first(len(sampled.prompt_ids))
        turn = RecordedTurn(
            index=len(self.turns),
            before=request.parent,
            inherited=inherited,
            origin=request.origin,
            name=name,
            sampled=replace(sampled, prompt_ids=prompt_ids),
            ids=ids,
            num_tokens=ids.used,
        )
        self.turns.append(turn)
        if isinstance(answer, str) and request.text:
            text = _bytes(request.text + answer)
            key = len(request.text) + len(answer), blake2b(text, digest_size=16).digest()
            self._texts[key] = turn
        if isinstance(answer, ChatMessage):
            with_tools, plain = (_next(digest, answer.key) for digest in request.digests)
            self._answers[with_tools] = turn
            self._answers_any_tools.add(plain)
        return turn

    def _place_of(self, parent: RecordedTurn | None) -> Origin:
        if parent is None:
            return Origin.NEW if self._seen else Origin.FIRST
        return Origin.BRANCHED if self._continued[parent.index] else Origin.CONTINUED


def _extended(parent: RecordedTurn | None, inherited: int, sampled: SampledTurn) -> SharedIds:
    """The tokens at the end of a turn, in the array of its parent where that ends with it.

    Raises RecordError.
    """
    prompt = sampled.prompt_ids
    if parent is not None and not _begins(prompt, parent.token_ids[:inherited]):
        raise RecordError("turns", f"the turn at {len(prompt)} does not continue its parent")
    if parent is not None and parent.ids.used == inherited:
        ids = parent.ids
    else:
        ids = SharedIds(prompt[:inherited])
    ids.append(np.concatenate([prompt[inherited:], sampled.output_ids]))
    return ids


def _chain(begin: bytes, keys: Sequence[bytes]) -> list[bytes]:
    """Digests of the first 0, 1, ... messages, by their keys."""
    digests = [begin]
    for key in keys:
        digests.append(_next(digests[-1], key))
    return digests


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _next(digest: bytes, key: bytes) -> bytes:
    return blake2b(digest + b"\0" + key, digest_size=16).digest()


def _begins(ids: Array, prefix: Array) -> bool:
    return len(prefix) <= len(ids) and bool(np.array_equal(ids[: len(prefix)], prefix))
