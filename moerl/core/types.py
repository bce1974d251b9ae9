"""Data types that all processes share: engine records, episode groups, batch plans.

Alignment rule (docs/alignment.md).  For a sequence of T tokens, S of them sampled by the policy:

- read-side data (routing) is indexed by the token that was FED IN: rows 0..T-2, because the last
  token is never fed in;
- write-side data (logprob, sampling mask, version) is indexed by the token that was PRODUCED: one
  row per sampled token.

Messages never shift data.  Only `moerl.data.packing` shifts: `labels = tokens[1:]`.
Example: prompt [5, 9], sampled [7, 2] gives token_ids [5, 9, 7, 2], loss_mask [0, 0, 1, 1], two
logprobs, two mask rows and three routing rows (for 5, 9 and 7).

Legend: T tokens, S sampled tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np

from moerl.core.errors import RecordError
from moerl.core.ids import packed_state, set_packed_state

_ITEM_BYTES = {"uint8": 1, "uint16": 2, "int32": 4, "int64": 8, "float16": 2, "float32": 4}
Array = np.ndarray


@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """One set of weights: the trainer's restart count and its optimizer step.  Ordered.

    A trainer that restarts from a checkpoint publishes different weights under step numbers that
    are already in use; the incarnation distinguishes them.
    """

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Inverse of `str`; SGLang's `weight_version` has this format.  Raises RecordError."""
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
    """A grammar that restricts the text of an answer, in SGLang's format.

    Only a request has a grammar.  In a record the sampling mask lists the allowed tokens.
    """

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """All sampling parameters of a request; engine defaults are never used.

    The sampling mask of SGLang's `pytorch` backend keeps a token if its rank is below top_k and the
    cumulative probability BEFORE it is at most top_p, both on the temperature-scaled full
    distribution.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1 = no limit
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None  # requests only; records have the sampling mask

    @property
    def truncates(self) -> bool:
        """Whether sampling may exclude vocabulary entries, so that a mask must be recorded."""
        return self.top_p < 1.0 or self.top_k != -1 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A typed, checksummed byte range of one sealed blob."""

    uri: str  # blob://NODE/NAME
    offset: int  # bytes from the start of the blob
    dtype: str  # numpy name, little-endian, of `_ITEM_BYTES`
    shape: tuple[int, ...]
    digest: str  # of the table of chunk digests: 16 hex digits

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class RoutingBlob:
    """Logical expert ids of consecutive fed-in tokens, recorded under one version.

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
    """Positions that sparse attention read for consecutive fed-in tokens, by layer.

    `packed` is [L, bytes] u8 in the format of `moerl.records.indexer`; L counts the layers that
    choose positions.
    """

    packed: BlobRef
    row_begin: int  # index of the first fed-in token
    row_end: int  # exclusive
    version: PolicyVersion
    layers: tuple[int, ...]  # global 0-based numbers of the layers that choose, ascending
    top_k: int  # positions per token


@dataclass(frozen=True, slots=True)
class MaskBlob:
    """Kept vocabulary entries of consecutive sampled tokens, CSR.

    `offsets` [n + 1] i64 starting at 0; `ids` [nnz] i32, per row sorted, unique and, in a sampling
    mask, containing the sampled token.  `logprobs` [nnz] f16: the engine's, where a run records
    them (`algorithm.centering`); of a mask their exponentials sum to 1 in each row.
    """

    offsets: BlobRef
    ids: BlobRef
    first: int  # index of the first sampled token (0..S-1)
    num_tokens: int
    logprobs: BlobRef | None = None


@dataclass(frozen=True, slots=True)
class LogprobBlob:
    """Behaviour log-probabilities of consecutive sampled tokens: f32, finite, <= 0."""

    values: BlobRef  # [num_tokens] float32
    first: int  # index of the first sampled token (0..S-1)
    num_tokens: int


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Run-length entry: sampled tokens from index `first` (0..S-1) on have this version."""

    first: int
    version: PolicyVersion
    # These tokens were sampled on a KV cache of older weights: no forward pass reproduces them.
    kept_kv: bool = False


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """End of a turn in a row of several.  After ABORT it continues in the next row."""

    end: int  # sampled tokens of the row up to here
    finish: Finish


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One row of training: header fields inline, large arrays by blob reference.

    A row holds one turn or a chain of turns (`rollout.turn_rows`).  In a chain, `loss_mask` is True
    on the sampled tokens of every turn, and the environment's tokens between turns are context.
    Example: prompt [5], turns [7, 2] and [3] with [9] between them: token_ids [5, 7, 2, 9, 3],
    loss_mask [0, 1, 1, 0, 1], routing rows 0..1 from the first call and 2..3 from the second,
    turn_ends (2, stop), (3, stop).

    The engine host makes a rollout, and nothing changes it afterwards.  `routing` tiles rows
    0..T-2 without gap or overlap; each row comes from the pass that produced its token.  `indexer`
    does the same for models with sparse attention.  `audit_rows` are the re-prefilled rows
    0..row_end of each resumed segment, kept only with `replay.audit`.

    An engine seals log-probabilities like routes: `logprobs` is then empty, and `sealed_logprobs`
    tiles the sampled tokens.  `moerl.records.blob_ranges.read_logprobs` reads both forms.
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
    # The engine's likeliest entries, with log-probabilities; only where sampling truncates nothing
    top_logprobs: tuple[MaskBlob, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def prompt_len(self) -> int:
        """Number of tokens before the first sampled token."""
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
        """Index of the first sampled token (0..S-1) after a change of weights; S = no change.

        The rows before this token come from different weights than the token itself, so no forward
        pass reproduces the row from here on.
        """
        first, *later = self.versions
        others = [part for part in self.routing if part.version != first.version]
        if first.kept_kv or (others and others[0].row_begin < self.prompt_len):
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
    """Continue one sequence: the first call of a rollout, or the resumption of a partial rollout.

    The siblings of a call share one `prompt_ids` object, so pickle writes it once.
    """

    rollout_id: str
    segment: int  # 0 for the first call; part of the blob names, so a rollout never reuses it
    tail_ids: Array  # i32: tokens after prompt_ids, sampled or not
    num_sampled: int  # sampled tokens at the end of token_ids
    sampling: SamplingParams  # max_new_tokens is the remaining number
    audit: bool = False  # also return the rows of the prefix that earlier calls delivered
    rows_known: int = 0  # leading rows that earlier turns delivered
    prompt_ids: Array = field(default_factory=lambda: np.zeros(0, np.int32))  # i32: leading tokens
    streams: bool = False  # the engine also reports tokens while it samples them

    def __getstate__(self) -> list[Any]:
        return packed_state(self, "tail_ids")  # not prompt_ids, which the siblings share

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
        """Index of the first fed-in token whose routing row is new.

        A first call needs every row that no earlier turn delivered, including the row of the
        earlier turn's last token.  A partial rollout of T' tokens has delivered rows 0..T'-2; the
        resumed call produces the row of the last token, under its own weights.
        """
        return self.num_tokens - 1 if self.num_sampled else self.rows_known


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Output of one request under one policy version, checked and sealed by the engine host.

    n = len(output_ids) is 0 when the request was aborted before its first token.  The segment
    then has no rows, and the controller sends the same request again.
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
    rest: tuple[Segment, ...] = ()  # later parts, sampled by newer weights after in-place updates
    sealed_logprobs: LogprobBlob | None = None
    indexer: IndexerBlob | None = None  # rows rows_from .. T' + n - 1
    audit_indexer: IndexerBlob | None = None  # positions of audit_rows
    top_logprobs: MaskBlob | None = None  # see Rollout
    entropies: Array | None = None  # [n] f16, nats; where steps end by them

    def __getstate__(self) -> list[Any]:
        return packed_state(self, "output_ids")

    def __setstate__(self, state: list[Any]) -> None:
        set_packed_state(self, state, "output_ids")

    @property
    def pieces(self) -> tuple[Segment, ...]:
        """This segment and `rest`, one segment per version, in order."""
        return (self, *self.rest)

    @property
    def num_sampled(self) -> int:
        """Tokens of all pieces."""
        return sum(len(piece.output_ids) for piece in self.pieces)


MOST_REWARD = float(np.sqrt(np.finfo(np.float32).max))  # 1.8e19


def reward_problem(reward: float) -> str:
    """Why a number cannot be a reward; "" if it can.  Norms and deviations square it in float32."""
    if not math.isfinite(reward):
        return "is not finite"
    return "" if abs(reward) <= MOST_REWARD else "has a square that float32 cannot hold"


@dataclass(frozen=True, slots=True)
class Score:
    """A scorer's result for one episode."""

    reward: float
    # Process rewards: (index into the episode's sampled tokens where a step ends, its reward).
    steps: tuple[tuple[int, float], ...] = ()
    # Process rewards of a text scorer: (characters of the response before the step ends, reward).
    text_steps: tuple[tuple[int, float], ...] = ()
    turns: tuple[float, ...] = ()  # process rewards of whole turns, one per turn
    errors: float = 0.0  # errors of tools and format, >= 0; GRPO-RoC prefers successes with few
    metrics: dict[str, float] = field(default_factory=dict)  # numbers for `reward/{name}`
    reason: str = ""  # for the report
    answer: str = ""  # that the scorer extracted, for majorities
    roles: dict[str, float] = field(default_factory=dict)  # rewards of roles of the policy
    forks: tuple[float, ...] = ()  # rewards of further continuations, in the order of their rows

    def reward_of(self, role: str) -> float:
        """Of a role `solver`, or of `solver.2`; a role without a reward shares the episode's."""
        return self.roles.get(role, self.roles.get(base_role(role), self.reward))


def base_role(role: str) -> str:
    """The role without the number of its conversation: `solver` of `solver.2`."""
    return role.partition(".")[0]


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One node of an episode's graph: a row of training, with one turn or a chain of turns."""

    rollout: Rollout
    parents: tuple[int, ...] = ()  # indices of earlier nodes of the same episode
    origins: tuple[str, ...] = ()  # per trained turn: how its request continued the conversation
    role: str = ""  # of the policy in all of its turns
    # Another continuation of the episode's answer, behind so many of its sampled tokens; -1: none
    fork_at: int = -1


# Why a turn is left out of training; "" = it is trained.
LeftOut = Literal[
    "",
    "other_model",  # another model answered
    "held_out",  # the turn belongs to an evaluation
    "no_answer",  # the engine or the other model failed
    "refused",  # the engine's record or the request's grammar was refused
    "cancelled",  # the client left, or the episode ended, before the turn did
    "failed",  # the episode failed
    "ended",  # the episode was ended because a sibling failed
    "stale",  # the episode was ended because its group was too old
    "version_gone",  # a continuation of a pivot whose weights were replaced meanwhile
]


@dataclass(frozen=True, slots=True)
class GraphTurn:
    """A requested turn of an episode, answered by the policy or by another model.

    A turn of the policy: `("7.0.t2", "7.0.t1", "policy", "", (PolicyVersion(0, 4),), 31)`.  A call
    of a judge after it: `("7.0.t3", "", "judge", "other_model")`.
    """

    name: str  # unique in a run
    # Name of the turn whose tokens begin this turn's prompt, or "".  The tokens of other models are
    # unknown, so their turns have no parent and are no parent.
    parent: str
    role: str  # policy, policy/ROLE, or the name of another model
    left_out: LeftOut = ""
    versions: tuple[PolicyVersion, ...] = ()  # versions that sampled the tokens, in order
    num_sampled: int = 0  # tokens that the policy sampled
    tools: tuple[str, ...] = ()  # names of the functions that its answer calls, in order
    fork_at: int = -1  # sampled tokens of its parent that it continues in another way; -1: all

    @property
    def trained(self) -> bool:
        return not self.left_out


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """A directed graph of rows; a single-turn rollout is an episode with one row."""

    episode_id: str  # "{group_id}.{sibling}"
    turns: tuple[Turn, ...]
    score: Score | None = None
    # All requested turns, in the order of their requests; the trained turns are also in the rows.
    # Empty when the rows were not sampled for training (demonstrations, audits).
    graph: tuple[GraphTurn, ...] = ()

    def turn_lengths(self) -> list[tuple[int, Finish]]:
        """(sampled tokens, finish) of each turn of the policy, over all rows."""
        return turn_lengths(turn.rollout for turn in self.turns if turn.fork_at < 0)


def turn_lengths(rows: Iterable[Rollout]) -> list[tuple[int, Finish]]:
    """(sampled tokens, finish) of each turn in these rows of an episode, in order."""
    found: list[tuple[int, Finish]] = []
    carried = 0  # tokens of a turn that began in an earlier row
    for end, length in ((end, n) for row in rows for end, n in _lengths(row)):
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
class PromptOrigin:
    """Place of a prompt in a user's file; `str` is for messages: "line 31 of x.jsonl"."""

    path: str
    line: int  # lines count from 1; rows of tables and entries of JSON arrays from 0
    unit: Literal["line", "row", "entry"] = "line"

    def __str__(self) -> str:
        return f"{self.unit} {self.line} of {self.path}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the stream.  `index` is its position in the endless, deterministic stream."""

    index: int
    token_ids: tuple[int, ...]
    text: str  # for logs and report
    answer: Any  # plain data for the reward function
    extra: dict[str, Any]  # further fields of the source, passed to the reward
    task: str = ""  # label of the task; "" = the run has one task
    origin: PromptOrigin | None = None  # None: it comes from no file

    @property
    def name(self) -> str:
        """For messages: "line 31 of x.jsonl", or "prompt 31"."""
        return str(self.origin or f"prompt {self.index}")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model that requests and records depend on."""

    vocab_size: int
    num_layers: int  # hidden layers, including dense layers
    moe_layers: tuple[int, ...]  # 0-based numbers of the MoE layers, ascending; empty = dense model
    num_experts: int
    top_k: int
    eos_token_ids: tuple[int, ...] = ()  # tokens that end a sequence unless sampling.ignore_eos
    index_layers: tuple[int, ...] = ()  # layers that choose positions; empty = attention is dense
    index_topk: int = 0  # positions per token
    context_tokens: int = 0  # longest sequence that the engines accept; 0 = unknown


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeGroup:
    """Sibling episodes of one prompt: the unit of admission, advantage and consumption."""

    # Prompt.index, or ~Prompt.index for late siblings; the surviving history trains it exactly once
    group_id: int
    prompt: Prompt
    episodes: tuple[Episode, ...]
    # Rewards of siblings in another group, and of dropped stale siblings, for the baseline
    peers: tuple[float, ...] = ()

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
    """Log-probabilities of one rollout under reference and teacher, from separate ranks.

    They are taken at the student's temperature and over the student's recorded sampling masks.
    """

    rollout_id: str
    record: str  # digest of record and models (`moerl.data.ref_scores`)
    logprobs: dict[str, Array]  # role -> [S] f32, natural log
    teachers: dict[str, PolicyVersion] = field(default_factory=dict)
    """Version of each teacher that follows the policy, by name."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchPlan:
    """One batch of rollouts: the groups, and the rank, microbatch and row of each rollout.

    Every data-parallel rank has the same number of microbatches, because an expert-parallel
    exchange needs all ranks.  A rank without rows in a microbatch trains one row of padding.
    """

    step: int  # 0-based number of the batch
    version: PolicyVersion  # weights the step starts from
    groups: tuple[EpisodeGroup, ...]
    rows: tuple[PlanRow, ...]
    num_microbatches: int
    ref_models: tuple[RefScores, ...] = ()  # by row; empty when the trainer computes the scores
    teachers: dict[str, PolicyVersion] = field(default_factory=dict)
    """Version of each teacher that follows the policy, by name; one for the whole batch."""

    def rollouts(self) -> list[Rollout]:
        """Rollouts by row."""
        return [self.groups[r.group].episodes[r.episode].turns[r.turn].rollout for r in self.rows]
