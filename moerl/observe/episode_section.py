"""Episodes of the report: turns with their versions, their rows, and the trained turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from moerl.observe.charts import COLORS
from moerl.observe.page import PageSection, Passage, Transcript, visible

T = TypeVar("T")
MAX_EPISODES = 12  # spread over the run

# Requests of an agent that do more than begin or continue a conversation (docs/agents.md).
_REASONS = {
    "new": "another conversation",
    "branched": "its parent was continued before",
    "repeated": "the same request again",
    "rewritten": "the history was rewritten",
    "tools_changed": "with other tools",
}


class _Piece(msgspec.Struct):
    version: str = "-"
    kept_kv: bool = False
    tokens: int = 0
    text: str = ""


class _Turn(msgspec.Struct):
    """As `moerl.controller.shown_turns` writes it."""

    row: int = 0
    continues: int | None = None
    shared_tokens: int = 0
    origin: str = ""
    context: str = ""
    context_tokens: int = 0
    answer: str = ""
    pieces: list[_Piece] = []
    finish: str = "-"


class _GraphTurn(msgspec.Struct):
    """As `moerl.controller.shown_turns` writes it."""

    name: str = "-"
    parent: str = ""
    role: str = "-"
    left_out: str = ""
    versions: list[str] = []
    tokens: int = 0

    def line(self) -> str:
        """One line of text."""
        parent = f"continues {self.parent}" if self.parent else ""
        of = f"version {', '.join(self.versions)}" if self.versions else ""
        tokens = f"{self.tokens} tokens" if self.tokens else ""
        why = f"not trained: {self.left_out.replace('_', ' ')}" if self.left_out else "trained"
        return "; ".join(filter(None, [f"{self.name} {self.role}", parent, of, tokens, why]))


def episode_section(samples: Sequence[Any]) -> list[PageSection]:
    """A section with sampled episodes of several turns; [] without any."""
    found = [(sample, turns) for sample in samples if (turns := _turns(sample))]
    if not any(len(turns) > 1 or len(_graph(sample)) > 1 for sample, turns in found):
        return []
    if len(found) > MAX_EPISODES:
        last = len(found) - 1
        found = [found[round(i * last / (MAX_EPISODES - 1))] for i in range(MAX_EPISODES)]
    return [
        PageSection(
            "Episodes",
            "Sampled tokens have a coloured edge, one colour for each version of the weights, and "
            "are trained. All other text is context and is not trained. Each token is shown once: "
            "a row that continues another begins where the two differ.",
            transcripts=[_transcript(sample, turns) for sample, turns in found],
        )
    ]


def _turns(sample: Any) -> list[_Turn]:
    return _read(sample, "turns", _Turn)


def _graph(sample: Any) -> list[_GraphTurn]:
    return _read(sample, "graph", _GraphTurn)


def _read(sample: Any, field: str, kind: type[T]) -> list[T]:
    """A list in a sample; [] where the line has another form."""
    try:
        return msgspec.convert(sample[field], list[kind])  # type: ignore[valid-type]
    except (msgspec.ValidationError, UnicodeError, LookupError, TypeError):
        return []


def _transcript(sample: Mapping[str, Any], turns: Sequence[_Turn]) -> Transcript:
    versions = list(dict.fromkeys(piece.version for turn in turns for piece in turn.pieces))
    sampled = sum(piece.tokens for turn in turns for piece in turn.pieces)
    context = sum(turn.context_tokens for turn in turns)
    rows = len({turn.row for turn in turns})
    reward = sample.get("reward")
    shown = f"{reward:.3f}" if isinstance(reward, int | float) else "-"
    title = f"step {sample.get('step', '-')}, episode {sample.get('episode', '-')}: reward {shown}"
    note = (
        f"{len(turns)} turns in {rows} {'row' if rows == 1 else 'rows'}; {sampled} tokens trained, "
        f"{context} of context; lag {sample.get('lag', '-')}"
    )
    passages = [part for number in range(len(turns)) for part in _passages(turns, number, versions)]
    graph = "\n".join(turn.line() for turn in _graph(sample))
    if graph:
        passages.insert(0, Passage("all turns that were asked for", visible(graph)))
    return Transcript(visible(title), visible(note), passages)


def _passages(turns: Sequence[_Turn], number: int, versions: Sequence[str]) -> Iterator[Passage]:
    turn = turns[number]
    begins = number == 0 or turns[number - 1].row != turn.row
    head = f"context, {turn.context_tokens} tokens, not trained"
    if begins and turn.row:
        head = f"{_row_begins(turn)}; {head}"
    if turn.context or begins:
        yield Passage(visible(head), visible(turn.context))
    why = _REASONS.get(turn.origin, "")
    for place, piece in enumerate(turn.pieces):
        label = f"turn {number + 1}, version {piece.version}, {piece.tokens} tokens, trained"
        notes = [
            "after an update of the weights" if place else why,
            "on the KV cache of older weights" if piece.kept_kv else "",
            f"ended: {turn.finish}" if piece is turn.pieces[-1] else "",
        ]
        label = "; ".join([label, *filter(None, notes)])
        colour = versions.index(piece.version) % len(COLORS) + 1
        yield Passage(visible(label), visible(piece.text), colour)


def _row_begins(turn: _Turn) -> str:
    if turn.continues is None:
        return f"row {turn.row + 1} begins"
    shared = f"has the first {turn.shared_tokens} tokens of row {turn.continues + 1}"
    return f"row {turn.row + 1} {shared}"
