"""The recorded turns of an episode, and the turn that a request continues.

Turns form a forest: the prompt of a child begins with the tokens of its parent.  A request names no
parent.  It is recognised by its messages: the deepest recorded turn whose request and answer are
its first messages.  Without such a turn it is a new root.

A digest runs over the keys of the messages, so that a request of n messages takes n look-ups.  The
tools and the arguments of the template are in the first digest: a template writes them before the
first message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b

import msgspec
import numpy as np

from moerl.agents.chat_messages import ChatMessage, Json, tools_key
from moerl.core.types import Array
from moerl.episodes.finished_episode import RecordedTurn

_NONE: Json = {}


class Origin(StrEnum):
    """How the request of a turn relates to the turns before it."""

    FIRST = "first"  # the first request of the episode
    CONTINUED = "continued"  # the first that continues its parent
    BRANCHED = "branched"  # its parent was continued before, in another way
    REPEATED = "repeated"  # the same messages as an earlier request: a retry, or n above 1
    REWRITTEN = "rewritten"  # holds answers that the policy did not give in this form
    TOOLS_CHANGED = "tools_changed"  # a recorded conversation with other tools
    ARGUMENTS_CHANGED = "arguments_changed"  # a recorded conversation, other template arguments
    NEW = "new"  # another conversation without an answer: a sub-agent, a summary


@dataclass(frozen=True, slots=True)
class MatchedRequest:
    """A request as the forest recognises it.

    covered: number of its messages, or of its characters, that the parent holds.
    digests: of all its messages, with tools and arguments and without.
    tools: digest of its tools.
    """

    parent: RecordedTurn | None
    covered: int
    origin: Origin
    digests: tuple[bytes, bytes]
    text: str = ""
    tools: bytes = b""


class TurnForest:
    """The turns of one episode, in the order in which they ended."""

    def __init__(self) -> None:
        self.turns: list[RecordedTurn] = []
        self._answers: dict[bytes, RecordedTurn] = {}  # by digest up to the answer; the newest
        self._tools: dict[bytes, bytes] = {}  # of answers by digest without them; the newest
        self._texts: dict[tuple[int, bytes], RecordedTurn] = {}  # by length and digest; the newest
        self._seen: set[bytes] = set()  # requests
        self._continued: Counter[str] = Counter()  # requests that continue a turn

    def match(
        self, messages: Sequence[ChatMessage], tools: Sequence[Json], arguments: Json = _NONE
    ) -> MatchedRequest:
        """Recognise a request.  arguments: of the template."""
        told = blake2b(tools_key(tools), digest_size=16).digest()
        begins = _next(told, msgspec.json.encode(arguments, order="sorted")), b""
        keys = [message.key for message in messages]
        chains = [_chain(begin, keys) for begin in begins]
        whole, plain = chains
        found = [place for place, digest in enumerate(whole) if digest in self._answers]
        covered = found[-1] if found else 0
        parent = self._answers[whole[covered]] if found else None
        other = next((self._tools[one] for one in reversed(plain) if one in self._tools), None)
        if parent is None and other is not None:
            origin = Origin.ARGUMENTS_CHANGED if other == told else Origin.TOOLS_CHANGED
        elif any(message.role == "assistant" for message in messages[covered:]):
            origin = Origin.REWRITTEN
        else:
            origin = self._place_of(parent)
        return MatchedRequest(parent, covered, origin, (whole[-1], plain[-1]), tools=told)

    def match_text(self, prompt: str) -> MatchedRequest:
        """The deepest turn whose prompt and answer begin this text."""
        parent, covered, begin, running = None, 0, 0, blake2b(digest_size=16)
        for end in sorted({length for length, _ in self._texts if length <= len(prompt)}):
            running.update(_bytes(prompt[begin:end]))
            begin = end
            if (found := self._texts.get((end, running.digest()))) is not None:
                parent, covered = found, end
        digest = _next(b"text", _bytes(prompt))
        return MatchedRequest(parent, covered, self._place_of(parent), (digest, digest), prompt)

    def match_tokens(self, ids: Array) -> MatchedRequest:
        """The deepest turn whose tokens begin these."""
        deepest_first = sorted(self.turns, key=lambda turn: turn.num_tokens)[::-1]
        parent = next((turn for turn in deepest_first if _begins(ids, turn.token_ids)), None)
        digest = _next(b"tokens", np.asarray(ids, np.int32).tobytes())
        return MatchedRequest(parent, 0, self._place_of(parent), (digest, digest))

    def begin(self, request: MatchedRequest) -> MatchedRequest:
        """A turn of this request begins; an equal request after it is `repeated`."""
        if request.parent is not None:
            self._continued[request.parent.name] += 1
        if request.digests[0] in self._seen:
            return replace(request, origin=Origin.REPEATED)
        self._seen.add(request.digests[0])
        return request

    def add(self, request: MatchedRequest, answer: ChatMessage | str, turn: RecordedTurn) -> None:
        """Add a turn.  answer: as the client sees it, or its text if the client requested text."""
        self.turns.append(turn)
        if isinstance(answer, str) and request.text:
            text = _bytes(request.text + answer)
            key = len(request.text) + len(answer), blake2b(text, digest_size=16).digest()
            self._texts[key] = turn
        if isinstance(answer, ChatMessage):
            with_tools, plain = (_next(digest, answer.key) for digest in request.digests)
            self._answers[with_tools] = turn
            self._tools[plain] = request.tools

    def _place_of(self, parent: RecordedTurn | None) -> Origin:
        if parent is None:
            return Origin.NEW if self._seen else Origin.FIRST
        return Origin.BRANCHED if self._continued[parent.name] else Origin.CONTINUED


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
