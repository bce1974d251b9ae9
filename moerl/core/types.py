"""The data types of the system: records of engines, groups of the controller, plans of a trainer.

Alignment rule (docs/alignment.md).  For a sequence of T tokens, S of them sampled by the policy:

- read-side data (routing) is indexed by the token that was FED IN: rows 0..T-2, since the last
  token is never fed;
- write-side data (logprob, sampling mask, version) is indexed by the token that was PRODUCED: one
  row per sampled token.

Messages never shift data; `moerl.data.packing` does `labels = tokens[1:]` once, and no other code
shifts.  Example: prompt [5, 9], sampled [7, 2]: token_ids [5, 9, 7, 2], loss_mask [0, 0, 1, 1], two
logprobs, two mask rows, three routing rows (for 5, 9 and 7).

Legend: T tokens, S sampled tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np

from moerl.core.errors import RecordError
from moerl.core.ids import packed_state, set_packed_state

_ITEM_BYTES = {"uint8": 1, "uint16": 2, "int32": 4, "int64": 8, "float32": 4}
Array = np.ndarray


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """One set of weights: the trainer's restart count and its optimizer step.  Ordered.

    A trainer that restarts from a checkpoint publishes other weights under step numbers that were
    used before; the incarnation tells them apart.
    """

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Inverse of `str`; the format of SGLang's `weight_version`."""
        incarnation, dot, step = text.partition(".")
        if not (dot and incarnation.isdigit() and step.isdigit()):
            raise RecordError("version", f"weight version {text!r} is not INCARNATION.STEP")
        return cls(int(incarnation), int(step))


class Finish(StrEnum):
    """Why sampling ended: a stop token, the length limit, or an abort that was not resumed."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that a client gives: the texts that an answer may be, in the form of SGLang.

    It is part of a request.  A record has none: its sampling mask holds the allowed tokens.
    """

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Every parameter of a request; engine defaults are never used.

    Sampling mask (SGLang, `pytorch` sampling backend): rank < top_k and cumulative probability
    BEFORE the token <= top_p, both on the temperature-scaled full distribution.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1 = no limit
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None  # of a request; in records the sampling mask tells of it

    @property
    def truncates(self) -> bool:
        """True when sampling may exclude part of the vocabulary: a mask must then be recorded."""
        return self.top_p < 1.0 or self.top_k != -1 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A typed, checksummed byte range of one sealed blob."""

    uri: str  # blob://NODE/NAME
    offset: int  # bytes from the start of the blob
    dtype: str  # numpy name, little-endian: uint8, uint16, int32, int64
    shape: tuple[int, ...]
    digest: str  # of the table of chunk digests: 16 hex digits

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class RoutingBlob:
    """Logical expert ids of consecutive fed-in tokens, recorded by one forward pass of one version.

    `ids` is [L, row_end - row_begin, K] u8 (E <= 256) or u16, layer-major so that a pipeline
    stage reads one contiguous range.
    """

    ids: BlobRef
    row_begin: int  # index of the first fed-in token
    row_end: int  # exclusive
    version: PolicyVersion
    layers: tuple[int, ...]  # global 0-based layer numbers of the MoE layers, ascending
    num_experts: int


@dataclass(frozen=True, slots=True)
class IndexerBlob:
    """Positions that sparse attention read for consecutive fed-in tokens, as RoutingBlob.

    `packed` is [L, bytes] u8, L layers that choose, in the form of `moerl.records.indexer`.
    """

    packed: BlobRef
    row_begin: int  # index of the first fed-in token
    row_end: int  # exclusive
    version: PolicyVersion
    layers: tuple[int, ...]  # global 0-based layer numbers of the layers that choose, ascending
    top_k: int  # positions per token


@dataclass(frozen=True, slots=True)
class MaskBlob:
    """Kept vocabulary entries of consecutive sampled tokens, CSR.

    `offsets` [n + 1] i64 starting at 0; `ids` [nnz] i32, per row sorted, unique and containing the
    sampled token.
    """

    offsets: BlobRef
    ids: BlobRef
    first: int  # index of the first sampled token (0..S-1)
    num_tokens: int


@dataclass(frozen=True, slots=True)
class LogprobBlob:
    """Behaviour log-probabilities of consecutive sampled tokens: f32, finite, <= 0."""

    values: BlobRef  # [num_tokens] float32
    first: int  # index of the first sampled token (0..S-1)
    num_tokens: int


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Run-length entry: sampled tokens from `first` (index into 0..S-1) on have this version."""

    first: int
    version: PolicyVersion
    # Sampled on a KV cache of older weights: no forward pass reproduces it.
    kept_kv: bool = False


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """End of one turn inside a row that holds several.

    ABORT: the turn continues in the episode's next row.
    """

    end: int  # sampled tokens of the row up to here
    finish: Finish


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One row of training as admitted: header fields inline, big arrays by blob reference.

    One turn, or a chain of turns (`rollout.turn_rows`): then `loss_mask` is True on the sampled
    tokens of each, and the environment's tokens between them are context.  Example: prompt [5],
    turns [7, 2] and [3], between them [9]: token_ids [5, 7, 2, 9, 3], loss_mask [0, 1, 1, 0, 1],
    routing rows 0..1 of the first call and 2..3 of the second, turn_ends (2, stop), (3, stop).

    Set by the engine host, immutable afterwards.  `routing` tiles rows 0..T-2 without gap or
    overlap, from the pass that produced each token, and so does `indexer`, where the model's
    attention is sparse; `audit_rows` are the re-prefilled rows
    0..row_end of each resumed segment, kept only with `replay.audit`.

    Engines seal log-probabilities like routes: then `logprobs` is empty and `sealed_logprobs` tiles
    the sampled tokens.  `moerl.records.blob_ranges.read_logprobs` reads either form.
    """

    rollout_id: str
    token_ids: Array  # [T] i32
    loss_mask: Array  # [T] bool, True = sampled by the policy
    logprobs: Array  # [S] f32, natural log, after temperature and truncation; [0] when sealed
    versions: tuple[VersionSpan, ...]
    routing: tuple[RoutingBlob, ...]  # empty for a dense model
    sampling_mask: tuple[MaskBlob, ...]  # present if and only if sampling.truncates
    finish: Finish
    sampling: SamplingParams
    engine: int  # index of the engine that produced the last segment
    audit_rows: tuple[RoutingBlob, ...] = ()
    sealed_logprobs: tuple[LogprobBlob, ...] = ()
    indexer: tuple[IndexerBlob, ...] = ()
    audit_indexer: tuple[IndexerBlob, ...] = ()  # positions of audit_rows
    turn_ends: tuple[TurnEnd, ...] = ()  # empty = one turn

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def prompt_len(self) -> int:
        """Number of tokens before the first sampled one."""
        return int(np.argmax(self.loss_mask)) if self.num_sampled else self.num_tokens

    @property
    def oldest(self) -> PolicyVersion:
        return min(span.version for span in self.versions)

    @property
    def ends(self) -> tuple[TurnEnd, ...]:
        """The end of each turn, at least one."""
        return self.turn_ends or (TurnEnd(self.num_sampled, self.finish),)

    @property
    def joined_from(self) -> int:
        """First sampled token (0..S-1) behind a change of weights; S = no change.

        Rows of the tokens before it come from other weights than its own, so no forward pass
        reproduces the row from that token on.
        """
        first, *later = self.versions
        prompt_len = self.prompt_len
        context = (part for part in self.routing if part.row_begin < prompt_len)
        if first.kept_kv or any(part.version != first.version for part in context):
            return 0
        return later[0].first if later else self.num_sampled

    def version_of_tokens(self) -> list[PolicyVersion]:
        """Version of each sampled token, [S]."""
        ends = [span.first for span in self.versions[1:]] + [self.num_sampled]
        return [
            span.version
            for span, end in zip(self.versions, ends, strict=True)
            for _ in range(end - span.first)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """Continue one sequence: the first call of a rollout, or the resumption of a partial one.

    Siblings of a call share one `prompt_ids` object, so pickling the call writes it once.
    """

    rollout_id: str
    segment: int  # 0 for the first call; names the blobs, so never reused for a rollout
    tail_ids: Array  # i32: tokens after prompt_ids, sampled or not
    num_sampled: int  # sampled tokens at the end of token_ids
    sampling: SamplingParams  # max_new_tokens is the remaining number
    audit: bool = False  # also return the rows of the prefix that earlier calls delivered
    rows_known: int = 0  # leading rows that earlier turns delivered
    prompt_ids: Array = field(default_factory=lambda: np.zeros(0, np.int32))  # i32: leading tokens
    streams: bool = False  # the engine also tells its tokens while it samples them

    def __getstate__(self) -> list[Any]:
        return packed_state(self, "tail_ids")  # not prompt_ids: an object that siblings share

    def __setstate__(self, state: list[Any]) -> None:
        set_packed_state(self, state, "tail_ids")

    @property
    def name(self) -> str:
        """Unique in a run."""
        return f"{self.rollout_id}-s{self.segment}"

    @property
    def token_ids(self) -> Array:
        """[T'] i32: the prompt and the tokens sampled so far."""
        if not len(self.prompt_ids):
            return self.tail_ids
        return np.concatenate([self.prompt_ids, self.tail_ids])

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.tail_ids)

    @property
    def rows_from(self) -> int:
        """First fed-in token whose routing row is new.

        A first call needs every row that no earlier turn delivered, including the row of the
        earlier turn's last token.  A partial of T' tokens already delivered rows 0..T'-2: the row
        of its last token is produced by the resumed call, under the resumed call's weights.
        """
        return self.num_tokens - 1 if self.num_sampled else self.rows_known


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Output of one request under one policy version, checked and sealed by the engine host.

    n = len(output_ids) may be 0 when the request was aborted before its first token; then it has no
    rows of any kind and the same request is sent again.
    """

    rollout_id: str
    output_ids: Array  # [n] i32
    logprobs: Array  # [n] f32, after temperature and truncation, <= 0; [0] when sealed
    version: PolicyVersion
    finish: Finish  # ABORT: interrupted, to be resumed
    routing: RoutingBlob | None  # rows rows_from .. T' + n - 1
    sampling_mask: MaskBlob | None
    audit_rows: RoutingBlob | None  # rows 0 .. rows_from, re-prefilled under `version`
    engine: int
    cached_tokens: int  # prompt tokens served from the prefix cache
    start_s: float  # unix time the request was sent
    end_s: float
    prompt_rows: RoutingBlob | None = None  # rows before `routing`, stored once for all siblings
    kept_kv: bool = False  # see VersionSpan
    rest: tuple[Segment, ...] = ()  # parts by newer weights, after updates in place
    sealed_logprobs: LogprobBlob | None = None
    indexer: IndexerBlob | None = None  # rows rows_from .. T' + n - 1
    audit_indexer: IndexerBlob | None = None  # positions of audit_rows

    def __getstate__(self) -> list[Any]:
        return packed_state(self, "output_ids")

    def __setstate__(self, state: list[Any]) -> None:
        set_packed_state(self, state, "output_ids")

    @property
    def pieces(self) -> tuple[Segment, ...]:
        """This segment and its rest, one per version, in order."""
        return (self, *self.rest)

    @property
    def num_sampled(self) -> int:
        """Tokens of all pieces."""
        return sum(len(piece.output_ids) for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Score:
    """A scorer's result for one episode."""

    reward: float
    # Process rewards: (index into the episode's sampled tokens at which a step ends, its reward).
    steps: tuple[tuple[int, float], ...] = ()
    # The same from a scorer of text: (characters of the response before the step's end, reward).
    text_steps: tuple[tuple[int, float], ...] = ()
    turns: tuple[float, ...] = ()  # process rewards of whole turns, one per turn
    errors: float = 0.0  # of tools and format, >= 0; GRPO-RoC prefers successes with few


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One node of an episode's graph: a row of training, with one turn or several of a chain."""

    rollout: Rollout
    parents: tuple[int, ...] = ()  # indices of earlier nodes of the same episode
    origins: tuple[str, ...] = ()  # of its trained turns: what an agent's requests were


# Why a turn is not trained; empty: it is.
LeftOut = Literal[
    "",
    "other_model",  # its answer is another model's
    "held_out",  # it belongs to an evaluation
    "no_answer",  # the engine, or the other model, failed
    "refused",  # the engine's record, or the grammar of the request, was refused
    "cancelled",  # its client left, or its episode ended, before it did
    "failed",  # its episode failed
    "ended",  # its episode was ended because a sibling failed
    "stale",  # its episode was ended because its group was too old
]


@dataclass(frozen=True, slots=True)
class GraphTurn:
    """A requested turn of an episode, whichever model was to answer.

    Two turns: `("7.0.t2", "7.0.t1", "policy", "", (PolicyVersion(0, 4),), 31)`, and the call of
    a judge behind it: `("7.0.t3", "", "judge", "other_model")`.
    """

    name: str  # unique in a run
    # The turn with whose tokens its prompt begins; empty: none.  Tokens of another model are not
    # known, so its turns have none and are none.
    parent: str
    role: str  # policy, or the name of another model
    left_out: LeftOut = ""
    versions: tuple[PolicyVersion, ...] = ()  # that sampled its tokens, in order
    num_sampled: int = 0  # tokens of the policy

    @property
    def trained(self) -> bool:
        return not self.left_out


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """A directed graph of rows; a single-turn rollout is an episode of one."""

    episode_id: str  # "{group_id}.{sibling}"
    turns: tuple[Turn, ...]
    score: Score | None = None
    # Every turn that was asked for, in that order; its trained ones are in the rows.  Empty:
    # the rows were not sampled for training (demonstrations, audits).
    graph: tuple[GraphTurn, ...] = ()

    def turn_lengths(self) -> list[tuple[int, Finish]]:
        """Sampled tokens of each turn of the policy and how it ended, over all rows."""
        found: list[tuple[int, Finish]] = []
        carried = 0  # of a turn that began in an earlier row
        for end, length in ((end, n) for turn in self.turns for end, n in _lengths(turn.rollout)):
            if end.finish == Finish.ABORT:
                carried += length
            else:
                found.append((carried + length, end.finish))
                carried = 0
        return found


def _lengths(rollout: Rollout) -> list[tuple[TurnEnd, int]]:
    begins = (0, *(end.end for end in rollout.ends))
    return [(end, end.end - begin) for end, begin in zip(rollout.ends, begins, strict=False)]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the stream.  `index` is its position in the endless, deterministic stream."""

    index: int
    token_ids: tuple[int, ...]
    text: str  # for logs and report
    answer: Any  # plain data for the reward function
    extra: dict[str, Any]  # any further fields of the source, passed on to the reward
    task: str = ""  # label of its task; empty: the run has one


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Facts of a model that requests and records depend on."""

    vocab_size: int
    num_layers: int  # hidden layers, dense ones included
    moe_layers: tuple[int, ...]  # 0-based numbers of the MoE layers, ascending; empty = dense model
    num_experts: int
    top_k: int
    eos_token_ids: tuple[int, ...] = ()  # tokens that end a sequence unless sampling.ignore_eos
    index_layers: tuple[int, ...] = ()  # layers that choose positions; empty = attention is dense
    index_topk: int = 0  # positions per token
    context_tokens: int = 0  # longest sequence that the engines take; 0 = not known


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeGroup:
    """Sibling episodes of one prompt: the unit of admission, advantage and consumption."""

    # Prompt.index, or ~Prompt.index for late siblings; consumed exactly once in the surviving
    # history.
    group_id: int
    prompt: Prompt
    episodes: tuple[Episode, ...]
    peers: tuple[float, ...] = ()  # rewards of siblings in another group: part of the baseline

    def rollouts(self) -> list[Rollout]:
        return [turn.rollout for episode in self.episodes for turn in episode.turns]

    @property
    def oldest(self) -> PolicyVersion:
        return min(rollout.oldest for rollout in self.rollouts())

    @property
    def newest(self) -> PolicyVersion:
        return max(rollout.versions[-1].version for rollout in self.rollouts())


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Position of one row of one episode in the batch."""

    group: int  # index into BatchPlan.groups
    episode: int  # index into the group's episodes
    turn: int  # index into the episode's turns
    dp_rank: int
    microbatch: int
    row: int  # row inside the microbatch


@dataclass(frozen=True, slots=True, eq=False)
class RefScores:
    """Scores of one rollout by reference models (reference, teacher) on their own ranks.

    At the student's temperature and over the student's recorded sampling masks.
    """

    rollout_id: str
    record: str  # digest of record and models (`moerl.data.ref_scores`)
    logprobs: dict[str, Array]  # role -> [S] f32, natural log


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """One batch of rollouts: its groups, and the rank, microbatch and row of each of them.

    Every data-parallel rank has the same number of microbatches, because an expert-parallel
    exchange needs all ranks; a rank without rows in a microbatch trains one row of padding.
    """

    step: int  # 0-based number of the batch
    version: PolicyVersion  # weights the step starts from
    groups: tuple[EpisodeGroup, ...]
    rows: tuple[PlanRow, ...]
    num_microbatches: int
    ref_models: tuple[RefScores, ...] = ()  # by row; empty where the trainer computes them

    def rollouts(self) -> list[Rollout]:
        """Rollouts by row."""
        return [self.groups[r.group].episodes[r.episode].turns[r.turn].rollout for r in self.rows]
