"""A turn of the policy: in flight, and sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moerl.config.schema import SamplingConfig
from moerl.config.task_programs import policy_name
from moerl.core.errors import RecordError
from moerl.core.types import (
    Array,
    Finish,
    GenerateRequest,
    GraphTurn,
    LeftOut,
    ModelShape,
    SamplingParams,
    Segment,
    VersionSpan,
)

_NOTHING: Array = np.zeros(0, np.int32)


def sampling_params(config: SamplingConfig, model: ModelShape) -> SamplingParams:
    """Every parameter of a request, from the settings and the model's stop tokens."""
    return SamplingParams(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop_token_ids=model.eos_token_ids,
        ignore_eos=config.ignore_eos,
    )


class SharedIds:
    """Tokens of turns that continue one another: all begin the same array, which grows.

    An array of its own for each turn would be quadratic in the length of an episode.
    """

    def __init__(self, ids: Array) -> None:
        self._ids, self.used = np.asarray(ids, np.int32), len(ids)

    def first(self, count: int) -> Array:
        return self._ids[:count]

    def append(self, new: Array) -> None:
        begin, self.used = self.used, self.used + len(new)
        if self.used > len(self._ids):
            grown = np.empty(2 * self.used, np.int32)
            grown[:begin] = self._ids[:begin]
            self._ids = grown
        self._ids[begin : self.used] = new


@dataclass(frozen=True, slots=True, eq=False)
class SampledTurn:
    """A turn that has ended: the policy's prompt and the replies of its calls."""

    prompt_ids: Array  # [P] i32, the whole conversation before it
    segments: tuple[Segment, ...]
    sampling: SamplingParams
    trained: bool = True  # False: context of the turns behind it
    role: str = ""  # of the policy

    @property
    def output_ids(self) -> Array:
        return _joined(self.segments)

    @property
    def end(self) -> int:
        """Tokens of the conversation at its end."""
        return len(self.prompt_ids) + sum(len(segment.output_ids) for segment in self.segments)

    def in_graph(self, name: str, parent: str, left_out: LeftOut = "") -> GraphTurn:
        """The turn in the graph of its episode."""
        versions = tuple(dict.fromkeys(span.version for span in versions_of(self.segments)))
        return GraphTurn(
            name,
            parent,
            policy_name(self.role),
            left_out=left_out,
            versions=versions,
            num_sampled=self.end - len(self.prompt_ids),
        )


class TurnInFlight:
    """A turn that is being sampled: the segments that its calls have returned so far.

    A turn of T' tokens has routing rows 0..T'-2; the row of its last token is produced when that
    token is fed again, by the resumed call under its weights.  So concatenation is complete, and
    the row count T-1 is checked on admission.
    """

    def __init__(
        self,
        name: str,
        prompt_ids: Array,
        sampling: SamplingParams,
        *,
        audit: bool,
        rows_known: int = 0,
        slice_tokens: int = 0,
    ) -> None:
        """Start the turn; prompt_ids: [P] i32, the whole conversation; siblings may share the
        array.

        rows_known: leading rows that earlier turns have delivered.  slice_tokens: most sampled
        tokens of a call; 0 = only sampling's own limit.
        """
        self.name, self.prompt_ids, self.sampling, self.audit = name, prompt_ids, sampling, audit
        self.rows_known, self._slice = rows_known, slice_tokens
        self._asked = 0  # max tokens of the last request
        self.segments: list[Segment] = []
        self._calls = 0

    @property
    def num_sampled(self) -> int:
        return sum(len(segment.output_ids) for segment in self.segments)

    @property
    def num_fed(self) -> int:
        """Number of prompt tokens of the next request."""
        return len(self.prompt_ids) + self.num_sampled

    @property
    def finished(self) -> bool:
        return bool(self.segments) and self.segments[-1].finish != Finish.ABORT

    @property
    def output_ids(self) -> Array:
        """Tokens sampled so far."""
        return _joined(self.segments)

    def request(self, *, streams: bool = False) -> GenerateRequest:
        """The next request: feeds all tokens so far, samples the rest (of a slice)."""
        left = self.sampling.max_new_tokens - self.num_sampled
        self._asked = min(left, self._slice or left)
        sampling = self.sampling
        if self._asked != sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=self._asked)
        request = GenerateRequest(
            rollout_id=self.name,
            segment=self._calls,
            tail_ids=self.output_ids,
            num_sampled=self.num_sampled,
            sampling=sampling,
            audit=self.audit,
            rows_known=self.rows_known,
            prompt_ids=self.prompt_ids,
            streams=streams,
        )
        self._calls += 1
        return request

    def add(self, segment: Segment) -> None:
        """Add one reply: one segment per weight version that sampled it.

        A segment aborted before its first token adds nothing.  Raises RecordError.
        """
        for piece in segment.pieces:
            self._add(piece)
        if segment.pieces[-1].finish == Finish.LENGTH:
            self._end_slice()

    def continue_behind_stop(self) -> None:
        """The last token was a stop token of the request, but it does not end this turn."""
        full = self.num_sampled == self.sampling.max_new_tokens
        finish = Finish.LENGTH if full else Finish.ABORT
        self.segments[-1] = replace(self.segments[-1], finish=finish)

    def sampled(self, sampling: SamplingParams, role: str = "") -> SampledTurn:
        """The turn as it is trained.  sampling: its distribution."""
        return SampledTurn(self.prompt_ids, tuple(self.segments), sampling, role=role)

    def _end_slice(self) -> None:
        """The call ended at its slice's limit, not at the turn's: the turn is not finished.

        The engine checks the limit first, so the last token may still be a stop token.
        """
        if self._asked == self.sampling.max_new_tokens or not self._slice:
            return
        last, stops = int(self.segments[-1].output_ids[-1]), self.sampling.stop_token_ids
        if last in stops and not self.sampling.ignore_eos:
            self.segments[-1] = replace(self.segments[-1], finish=Finish.STOP)
        elif self.num_sampled < self.sampling.max_new_tokens:
            self.segments[-1] = replace(self.segments[-1], finish=Finish.ABORT)

    def _add(self, segment: Segment) -> None:
        if segment.rollout_id != self.name:
            raise RecordError("rollout_id", f"{segment.rollout_id} for {self.name}")
        if self.segments and segment.version < self.segments[-1].version:
            raise RecordError(
                "versions", f"{self.name}: {segment.version} after {self.segments[-1].version}"
            )
        if len(segment.output_ids) or segment.finish != Finish.ABORT:
            self.segments.append(segment)
        if self.num_sampled == self.sampling.max_new_tokens and not self.finished:
            # The limit was reached at the moment of the abort: the turn is finished.
            self.segments[-1] = replace(self.segments[-1], finish=Finish.LENGTH)


def versions_of(segments: Sequence[Segment]) -> tuple[VersionSpan, ...]:
    """Where the weights change in the tokens of one or several turns."""
    spans: list[VersionSpan] = []
    at = 0
    for segment in segments:
        span = VersionSpan(at, segment.version, segment.kept_kv)
        if len(segment.output_ids) and not (spans and _same_weights(spans[-1], span)):
            spans.append(span)
        at += len(segment.output_ids)
    return tuple(spans)


def _same_weights(a: VersionSpan, b: VersionSpan) -> bool:
    return a.version == b.version and a.kept_kv == b.kept_kv


def _joined(segments: Sequence[Segment]) -> Array:
    """[T] i32, their tokens; the tokens of a single segment are not copied: most turns have one."""
    if len(segments) == 1:
        return segments[0].output_ids.astype(np.int32, copy=False)
    parts = [_NOTHING, *(segment.output_ids for segment in segments)]
    return np.concatenate(parts).astype(np.int32, copy=False)
