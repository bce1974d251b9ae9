"""Episodes whose replies a test gives, without an event loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moerl.core.types import GenerateRequest, Prompt, Rollout, SamplingParams, Segment
from moerl.episodes.finished_episode import FinishedEpisode, RecordedTurn, TurnRows
from moerl.episodes.turn import TurnInFlight
from moerl.records.header_check import blob_uris


class ScriptedEpisode:
    """A chain of turns, sampled as `OpenEpisode` samples them."""

    def __init__(
        self, name: str, prompt: Prompt, sampling: SamplingParams, *, audit: bool = False
    ) -> None:
        self.name, self.prompt, self._sampling, self._audit = name, prompt, sampling, audit
        self.turns: list[RecordedTurn] = []
        self.uris: set[str] = set()
        self._begin(np.asarray(prompt.token_ids, np.int32))

    def request(self) -> GenerateRequest:
        return self.turn.request()

    def add(self, segment: Segment) -> None:
        self.uris |= blob_uris(segment)
        self.turn.add(segment)
        if self.turn.finished:
            parent = self.turns[-1] if self.turns else None
            known = 0 if parent is None else parent.num_tokens
            sampled = self.turn.sampled(self._sampling)
            self.turns.append(RecordedTurn(parent, known, "", self.turn.name, sampled))

    def reply(self, token_ids: Sequence[int]) -> None:
        """The environment's tokens behind the turn that has ended."""
        said = np.asarray(token_ids, np.int32)
        self._begin(np.concatenate([self.turns[-1].token_ids, said]))

    def finish(self) -> FinishedEpisode:
        names = [turn.name for turn in self.turns]
        graph = [
            turn.sampled.in_graph(turn.name, parent)
            for turn, parent in zip(self.turns, ["", *names], strict=False)
        ]
        uris, turns = frozenset(self.uris), tuple(self.turns)
        return FinishedEpisode(self.name, self.prompt, turns, uris, graph=tuple(graph))

    def rows(self, turn_rows: TurnRows) -> list[Rollout]:
        return [node.rollout for node in self.finish().nodes(turn_rows)]

    def _begin(self, prompt_ids: np.ndarray) -> None:
        known = self.turns[-1].num_tokens - 1 if self.turns else 0
        self.turn = TurnInFlight(
            f"{self.name}.t{len(self.turns)}",
            prompt_ids,
            self._sampling,
            audit=self._audit,
            rows_known=known,
        )
