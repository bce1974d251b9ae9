"""An episode in the making: turns of the policy, with an environment's replies between them.

Each turn is a rollout of its own whose prompt is everything said before, so an interruption of any
turn is the same as ever.  A turn names the routing rows of the one before it instead of recording
them again; that holds only while the same weights serve.  When an update came in between, the
engine's reply is refused as `known_rows` and the turn is asked for once more, with rows of its own.
Rejected: one rollout with gaps in its loss mask (a turn under newer weights has prefix rows of its
own, for which one row per token leaves no place).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moerl.errors import RecordError
from moerl.messages import Scorer
from moerl.rollout.assemble import PartialRollout
from moerl.rollout.blob_uris import blob_uris
from moerl.types import (
    Array,
    GenerateRequest,
    PolicyVersion,
    Prompt,
    Rollout,
    RoutingBlob,
    SamplingParams,
    Segment,
)


class PartialEpisode:
    """One sibling of a group."""

    def __init__(
        self,
        episode_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        audit: bool,
        max_turns: int = 1,
        slice_tokens: int = 0,
        prompt_ids: Array | None = None,
    ) -> None:
        """prompt_ids: the prompt's tokens as an array that siblings share.

        slice_tokens: the most that one engine call samples of a turn; 0 = no limit."""
        self._slice = slice_tokens
        self.episode_id, self.prompt, self.max_turns = episode_id, prompt, max_turns
        self.turns = [
            PartialRollout(
                episode_id,
                prompt,
                sampling,
                audit=audit,
                slice_tokens=slice_tokens,
                prompt_ids=prompt_ids,
            )
        ]
        self._wasted: set[str] = set()  # blobs of turns that were asked for once more
        self._ended = max_turns == 1

    @property
    def finished(self) -> bool:
        """Nothing is left to sample, and the environment has nothing to say."""
        return self.turns[-1].finished and self._ended

    @property
    def listens(self) -> bool:
        """A turn ended: `reply` must say how the episode goes on."""
        return self.turns[-1].finished and not self._ended

    @property
    def newest(self) -> PolicyVersion:
        return max(turn.newest for turn in self.turns)

    @property
    def num_sampled(self) -> int:
        return sum(turn.num_sampled for turn in self.turns)

    def request(self) -> GenerateRequest:
        return self.turns[-1].request()

    def add(self, segment: Segment) -> None:
        """Take a reply of the engine.  Raises RecordError."""
        turn = self.turns[-1]
        try:
            turn.add(segment)
        except RecordError as error:
            if error.reason != "known_rows":
                raise
            self._wasted |= blob_uris(segment)
            self.turns[-1] = PartialRollout(
                f"{turn.rollout_id}.own",
                turn.prompt,
                turn.sampling,
                audit=turn.audit,
                slice_tokens=self._slice,
            )

    def recomputed(self, segment: Segment) -> int:
        """Of `PartialRollout.recomputed`, for the turn that is being sampled."""
        return self.turns[-1].recomputed(segment)

    def reply(self, token_ids: Sequence[int]) -> None:
        """What the environment said of the turn that ended; nothing ends the episode."""
        if not token_ids:
            self._ended = True
            return
        before = self.turns[-1]
        rollout, number = before.rollout(), len(self.turns)
        prompt = Prompt(
            self.prompt.index,
            (*rollout.token_ids.tolist(), *token_ids),
            self.prompt.text,
            self.prompt.answer,
            self.prompt.extra,
        )
        is_one = len(rollout.versions) == 1 and not rollout.versions[0].kept_kv
        known: tuple[RoutingBlob, ...] = rollout.routing if is_one else ()
        if any(part.version != rollout.versions[0].version for part in known):
            known = ()
        self.turns.append(
            PartialRollout(
                f"{self.episode_id}.t{number}",
                prompt,
                before.sampling,
                audit=before.audit,
                known=known,
                slice_tokens=self._slice,
            )
        )
        self._ended = number + 1 == self.max_turns

    def blob_uris(self) -> set[str]:
        """Every blob sealed so far, for deletion when the episode is dropped."""
        return self._wasted.union(*(turn.blob_uris() for turn in self.turns))

    def wasted_uris(self) -> set[str]:
        """Blobs that no turn of the finished episode names."""
        return self._wasted


class Environment:
    """What answers the policy between turns: the task's own code, in the scorer's processes."""

    def __init__(
        self,
        scorer: Scorer,
        decode: Callable[[Sequence[int]], str],
        encode: Callable[[str], list[int]],
    ) -> None:
        self._scorer, self._decode, self._encode = scorer, decode, encode

    async def answer(self, episode: PartialEpisode) -> None:
        """Let the episode go on, or end it.  Raises ScoreError: it raised or took too long."""
        said = [text_of(turn.rollout(), self._decode) for turn in episode.turns]
        text = await self._scorer.reply(episode.prompt, said)
        episode.reply(self._encode(text) if text else ())


def text_of(rollout: Rollout, decode: Callable[[Sequence[int]], str]) -> str:
    """What the policy said in one turn."""
    return decode(rollout.token_ids[rollout.prompt_len :].tolist())
