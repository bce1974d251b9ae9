"""ModelSpec: the sizes and switches of one model.

It determines shapes, names and the forward computation; `spec_readers` makes it of a Hugging Face
config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Yarn(NamedTuple):
    """Context extension of the rotary embedding; names of the config's rope_parameters."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    truncate: bool  # correction range rounded to integers


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str  # Hugging Face model_type
    vocab_size: int  # without padding
    hidden: int
    layers: int  # without multi-token-prediction layers
    heads: int  # query heads
    kv_heads: int
    head_dim: int
    experts: int  # per MoE layer; 0 = dense model
    experts_per_token: int
    moe_ffn: int  # inner width of one expert
    moe_layers: tuple[int, ...]  # global 0-based numbers of the layers that route
    tied: bool  # output head and embedding are one tensor
    norm_topk_prob: bool  # gate weights of the chosen experts are divided by their sum
    rms_eps: float
    rope_theta: float
    max_positions: int
    dtype: str  # of the checkpoint: float32, bfloat16, float16

    root: str = ""  # prefix of every tensor's name: a language model inside another model

    # --- layer kinds and attention ---
    ffn: int = 0  # inner width of a dense layer; 0 = there is none
    shared_ffn: int = 0  # inner width of all shared experts together; 0 = none
    shared_gate: bool = False  # their output is scaled by a sigmoid of the hidden state
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # one weight of head_dim for all heads
    qk_norm_all_heads: bool = False  # a weight per element, normalised over all heads at once
    qk_l2_norm: bool = False  # without a weight, in layers that rotate
    nope_layers: tuple[int, ...] = ()  # layers without a rotary embedding
    longest: int = 0  # tokens of a sequence up to which attention is plain causal; 0 = any
    rotary_percent: float = 1.0  # part of head_dim that rotates
    rotary_pairs: bool = False  # neighbours rotate together, instead of the two halves of a head
    yarn: Yarn | None = None
    sinks: bool = False  # a learned logit per head that takes attention and gives no value
    sliding_window: int = 0  # positions seen by the layers of sliding_layers
    sliding_layers: tuple[int, ...] = ()

    output_gate: bool = False  # attention is scaled by a sigmoid; q_proj holds query, gate per head
    zero_centred_norm: bool = False  # norms scale by 1 + weight

    # --- gated delta net, in place of attention in the layers of linear_layers ---
    linear_layers: tuple[int, ...] = ()
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_key_dim: int = 0  # per head
    linear_value_dim: int = 0
    conv_width: int = 0

    # --- multi-head latent attention; kv_lora 0 = ordinary attention ---
    q_lora: int = 0  # 0 = the query is projected directly
    kv_lora: int = 0
    qk_nope: int = 0  # per head, without position
    qk_rope: int = 0  # per head, with position; the key's is shared by all heads
    v_head: int = 0

    # --- sparse attention: an indexer in each layer chooses positions; index_topk 0 = dense ---
    index_topk: int = 0  # positions that a token attends to
    index_heads: int = 0
    index_dim: int = 0  # per head; its one key has the same size

    # --- router ---
    score: str = "softmax"  # or sigmoid
    expert_bias: bool = False  # fp32, added to the scores for the choice only
    groups: int = 1  # experts are chosen from the best group_topk of these
    group_topk: int = 1
    group_score: str = ""  # how a group is rated: max, or sum of its top2
    topk_scaling: float = 1.0  # gate weights are multiplied by it
    weigh_input: bool = False  # gate weights scale the input of an expert, not its output

    mtp_layers: int = 0  # multi-token-prediction layers, stored as layers `layers`, ...

    # --- a value head in place of the language model's: one number per token ---
    values: int = 0  # 1: there is one; then `tied` is False
    value_bias: bool = False

    @property
    def q_rows(self) -> int:
        per_head = self.qk_nope + self.qk_rope if self.kv_lora else self.head_dim
        return self.heads * per_head * (2 if self.output_gate else 1)

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def o_cols(self) -> int:
        return self.heads * (self.v_head if self.kv_lora else self.head_dim)

    @property
    def kv_a_rows(self) -> int:
        return self.kv_lora + self.qk_rope

    @property
    def kv_b_rows(self) -> int:
        return self.heads * (self.qk_nope + self.v_head)

    @property
    def delta_keys(self) -> int:
        return self.linear_key_heads * self.linear_key_dim

    @property
    def delta_values(self) -> int:
        return self.linear_value_heads * self.linear_value_dim

    @property
    def delta_rows(self) -> int:
        """Queries, keys, values and gates of a gated delta net."""
        return 2 * self.delta_keys + 2 * self.delta_values

    @property
    def conv_rows(self) -> int:
        return 2 * self.delta_keys + self.delta_values

    @property
    def step_rows(self) -> int:
        """Step size and decay of each value head."""
        return 2 * self.linear_value_heads

    @property
    def fused_ffn(self) -> int:
        """Rows of an expert's gate and up in one tensor."""
        return 2 * self.moe_ffn

    @property
    def wide(self) -> int:
        """Columns of eh_proj: embedding and hidden state side by side."""
        return 2 * self.hidden

    def layer_prefix(self, number: int) -> str:
        """Prefix of the names of a layer's tensors, in files and in an engine."""
        return f"{self.root}model.layers.{number}."

    @property
    def one(self) -> int:
        return 1

    @property
    def index_rows(self) -> int:
        return self.index_heads * self.index_dim

    @property
    def index_layers(self) -> tuple[int, ...]:
        """Global 0-based numbers of the layers that choose positions."""
        return tuple(range(self.layers)) if self.index_topk else ()

    @property
    def direct_q(self) -> bool:
        """Latent attention whose query is projected directly."""
        return bool(self.kv_lora) and not self.q_lora

    @property
    def pre_softmax(self) -> bool:
        """Softmax over all experts, then the choice; else over the chosen experts only.

        Dividing the chosen probabilities by their sum is the softmax over the chosen logits.
        """
        return self.score == "softmax" and not self.norm_topk_prob


def padded_vocab(spec: ModelSpec, tp: int, divisible_by: int = 128) -> int:
    """Vocabulary rows Megatron allocates: the next multiple of divisible_by * tp.

    Source: megatron/core/tokenizers/utils/build_tokenizer.py (0.19.2).
    """
    multiple = divisible_by * tp
    return -(-spec.vocab_size // multiple) * multiple
