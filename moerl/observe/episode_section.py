"""Episodes of the report: turns with their versions, their rows, and the trained turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from moerl.observe.charts import COLORS
from moerl.observe.page import PageSection, Passage, Transcript

T = TypeVar("T")
MAX_EPISODES = 12  # spread over the run

# Requests of an agent that do more than begin or continue a conversation (docs/agents.md).
_REASONS = {
    "new": "another conversation",
    "branched": "its parent was continued before",
    "repeated": "the same request again",
    "rewritten": "the history was rewritten",
    "tools_changed": "with other tools",
    "arguments_changed": "with other arguments of the template",
}


class _Piece(msgspec.Struct):
    version: str = "-"
    kept_kv: bool = False
    tokens: int = 0
    text: str = ""


class _Step(msgspec.Struct):
    text: str = ""
    reward: float = 0.0


class _Turn(msgspec.Struct):
    """As `moerl.controller.step_metrics` writes it."""

    row: int = 0
    continues: int | None = None
    shared_tokens: int = 0
    origin: str = ""
    context: str = ""
    context_tokens: int = 0
    answer: str = ""
    pieces: list[_Piece] = []
    finish: str = "-"
    role: str = ""
    fork_at: int = -1
    reward: float | None = None  # of a fork
    steps: list[_Step] = []


class _GraphTurn(msgspec.Struct):
    name: str = "-"
    parent: str = ""
    role: str = "-"
    left_out: str = ""
    versions: list[str] = []
    tokens: int = 0
    tools: list[str] = []
    fork_at: int = -1

    def line(self) -> str:
        """One line of text."""
        behind = f" behind token {self.fork_at}" if self.fork_at >= 0 else ""
        parent = f"continues {self.parent}{behind}" if self.parent else ""
        of = f"version {', '.join(self.versions)}" if self.versions else ""
        tokens = f"{self.tokens} tokens" if self.tokens else ""
        calls = f"calls {', '.join(self.tools)}" if self.tools else ""
        why = f"not trained: {self.left_out.replace('_', ' ')}" if self.left_out else "trained"
        return "; ".join(filter(None, [f"{self.name} {self.role}", parent, of, tokens, calls, why]))


def spread(items: Sequence[T], limit: int) -> list[T]:
    """At most `limit` of the items, evenly spread from the first to the last."""
    if len(items) <= limit:
        return list(items)
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]


def reward_of(sample: Mapping[str, Any]) -> float | None:
    """The reward of a sample; None where it is not a number."""
    reward = sample.get("reward")
    return float(reward) if isinstance(reward, int | float) else None


def episode_section(samples: Sequence[Any]) -> list[PageSection]:
    """A section with sampled episodes; [] without any."""
    read = [
        (sample, _read(sample, "turns", _Turn), _read(sample, "graph", _GraphTurn))
        for sample in samples
    ]
    if not (found := [each for each in read if each[1]]):
        return []
    return [
        PageSection(
            "Episodes",
            "Sampled tokens have a coloured edge, one colour for each version of the weights, and "
            "are trained; their lag is the number of weight updates until then. All other text "
            "(prompts, tools, their replies) is context and is not trained. Each token is shown "
            "once: a row that continues another begins where the two differ.",
            transcripts=[_transcript(*each) for each in spread(found, MAX_EPISODES)],
        )
    ]


def _read(sample: Any, field: str, kind: type[T]) -> list[T]:
    """A list in a sample; [] where the line has another form."""
    try:
        return msgspec.convert(sample[field], list[kind])  # type: ignore[valid-type]
    except (msgspec.ValidationError, UnicodeError, LookupError, TypeError):
        return []


def _transcript(
    sample: Mapping[str, Any], turns: Sequence[_Turn], graph: Sequence[_GraphTurn]
) -> Transcript:
    pieces = [piece for turn in turns for piece in turn.pieces]
    versions = list(dict.fromkeys(piece.version for piece in pieces))
    context = sum(turn.context_tokens for turn in turns)
    rows = len({turn.row for turn in turns})
    reward = reward_of(sample)
    shown = "-" if reward is None else f"{reward:.3f}"
    if isinstance(roles := sample.get("roles"), Mapping):
        shown += "".join(f", {role} {value}" for role, value in roles.items())
    step = counted(sample.get("step"))
    title = f"step {step}, episode {sample.get('episode', '-')}: reward {shown}"
    note = (
        f"{len(turns)} {'turn' if len(turns) == 1 else 'turns'} "
        f"in {rows} {'row' if rows == 1 else 'rows'}; "
        f"{sum(piece.tokens for piece in pieces)} tokens trained, {context} of context; "
        f"lag {sample.get('lag', '-')}"
    )
    asked = "\n".join(turn.line() for turn in graph)
    passages = [Passage("all turns that were asked for", asked)] if asked else []
    for number in range(len(turns)):
        passages += _passages(turns, number, versions, sample.get("step"))
    return Transcript(title, note, passages)


def counted(step: object) -> str:
    """A step of the files, from 0, as pages and console count it: from 1."""
    return str(step + 1) if isinstance(step, int) else "-"


def _lag(version: str, step: object) -> str:
    """In words, of a piece that was sampled under `version` and trained in `step`."""
    sampled = version.rpartition(".")[2]
    return f"lag {step - int(sampled)}" if isinstance(step, int) and sampled.isdecimal() else ""


def _passages(
    turns: Sequence[_Turn], number: int, versions: Sequence[str], step: object
) -> Iterator[Passage]:
    """The passages of a turn.  step: in which the episode was trained."""
    turn = turns[number]
    begins = number == 0 or turns[number - 1].row != turn.row
    head = f"context, {turn.context_tokens} tokens, not trained"
    if begins and turn.row:
        shared = "begins"
        if turn.continues is not None:
            shared = f"has the first {turn.shared_tokens} tokens of row {turn.continues + 1}"
        head = f"row {turn.row + 1} {shared}; {head}"
    if turn.context or begins:
        yield Passage(head, turn.context)
    for place, piece in enumerate(turn.pieces):
        notes = [
            f"turn {number + 1}, version {piece.version}, {piece.tokens} tokens, trained",
            f"role {turn.role}" if turn.role else "",
            f"fork behind token {turn.fork_at}, reward {turn.reward}" if turn.fork_at >= 0 else "",
            _lag(piece.version, step),
            "after an update of the weights" if place else _REASONS.get(turn.origin, ""),
            "on the KV cache of older weights" if piece.kept_kv else "",
            f"ended: {turn.finish}" if piece is turn.pieces[-1] else "",
        ]
        colour = versions.index(piece.version) % len(COLORS) + 1
        yield Passage("; ".join(filter(None, notes)), piece.text, colour)
    if turn.steps:
        text = "\n".join(f"{step.reward:+.3f}  {step.text}" for step in turn.steps)
        yield Passage(f"rewards of the {len(turn.steps)} steps of turn {number + 1}", text)
