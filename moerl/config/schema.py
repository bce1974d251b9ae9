"""Every setting, one immutable dataclass per component; units are in the names.

A field's type states its allowed values: choices are `Literal`, ranges are in
`moerl.config.bounds`, and `moerl.config.validate` checks every value.  YAML only composes these
(`moerl.config.load`), an unknown key is an error, and cross-field checks are in
`moerl.config.checks`.  Nothing here imports torch, ray, megatron or sglang.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self

from msgspec import Meta

from moerl.config.bounds import (
    BelowOne,
    Count,
    Limit,
    Natural,
    NonNegative,
    Positive,
    Share,
    UnitInterval,
    UserPath,
)
from moerl.config.lora_settings import LoraConfig
from moerl.config.reward_terms import RewardTerm, RoleConfig
from moerl.config.task_kinds import TaskKind, kind_of_environment
from moerl.config.task_programs import AgentConfig, TaskLimits, ToolName

Role = Literal["controller", "engine", "trainer", "ref_models"]
Precision = Literal["fp32", "bf16"]
Dispatcher = Literal["alltoall", "allgather"]
TransformerImpl = Literal["auto", "transformer_engine", "local"]
Column = Literal["prompt", "messages", "tools", "answer", "chat_template_kwargs"]


@dataclass(frozen=True)
class TinyModel:
    """A random-weight Qwen3-MoE, made when `model.path` names no existing folder."""

    enabled: bool = False
    hidden_size: Count = 128
    num_layers: Count = 2
    num_heads: Count = 4
    num_kv_heads: Count = 2
    head_dim: Count = 32
    num_experts: Count = 8
    experts_per_token: Count = 2
    moe_ffn: Count = 64
    initializer_range: Positive = 0.05


@dataclass(frozen=True)
class ModelConfig:
    path: UserPath = ""  # Hugging Face folder: config.json, *.safetensors, tokenizer
    tiny: TinyModel = field(default_factory=TinyModel)
    # Output layer of bf16 trainers and engines in fp32: products, logits and their gradients
    fp32_lm_head: bool = False


@dataclass(frozen=True)
class TaskConfig:
    """Source of prompts and reward."""

    # A source of prompts by its name in SOURCES of `moerl.config.task_tables`
    name: str = "sort_digits"
    digits: Count = 4  # sort_digits: how many to sort; calculator: of each number
    dataset: str = ""  # reasoning_gym: dataset name
    dataset_args: dict[str, Any] = field(default_factory=dict)  # reasoning_gym: its own settings
    # jsonl: file of {"prompt": ..., "answer": ...} or {"messages": [...], ...}; hf_dataset: folder
    # of save_to_disk, *.parquet, *.arrow or *.csv files with these columns
    path: UserPath = ""
    split: str = ""  # of path, where it has several: train
    # jsonl, hf_dataset: names of their fields, where they differ: {prompt: question}; dots lead
    # into objects: {answer: reward_model.ground_truth}
    columns: dict[Column, str] = field(default_factory=dict)
    max_bad_lines: Natural = 0  # lines that cannot be used are set aside; more of them end the run
    overlong: Literal["refuse", "skip"] = "refuse"  # prompts that do not fit
    # exact_match | math_verify | position_steps | turn_gains | package.module:function | source (of
    # the source of prompts); empty = the program's or environment object's own, else source
    reward: str = ""
    # Several terms in place of `reward` (docs/scoring.md): [{name, weight, where, timeout_s, ...}]
    rewards: list[RewardTerm] = field(default_factory=list)
    # Roles of the policy in an episode, by name (docs/scoring.md): {solver: {loss_weight: 0.5}}
    roles: dict[str, RoleConfig] = field(default_factory=dict)
    # true: apply the tokenizer's chat template to a prompt of text; a file: this one in its place,
    # for messages too
    chat_template: bool | str = False
    # Variables of the template: {enable_thinking: false}; the field chat_template_kwargs of a line,
    # then a client's request, overrides them
    template_arguments: dict[str, Any] = field(default_factory=dict)
    # System message of templated prompts that bring none, such as the form of the answer
    system: str = ""
    # Part of a response that is scored (docs/scoring.md): all | answer | tags | last_number | a
    # regular expression with a group; empty = answer, for own functions and rewards of steps all
    extract: str = ""
    max_prompt_tokens: Count = 1024
    shuffle: bool = True
    scorer_workers: Count = 1
    score_timeout_s: Positive = 10.0
    # drop: replace the group and count it, unless more than half of them fail; stop: end the run
    on_score_error: Literal["drop", "stop"] = "drop"
    # Walls of rewards, environments, programs (docs/sandbox.md); bwrap: no network, read-only files
    isolation: Literal["process", "bwrap"] = "process"
    limits: TaskLimits = field(default_factory=TaskLimits)
    pass_environment: list[str] = field(default_factory=list)  # further variables that they see
    read_paths: list[str] = field(default_factory=list)  # bwrap: further files that they see
    # Answers between turns (docs/environments.md).  Text: calculator | check_digits |
    # package.module:function; objects: package.module:Class | sandbox_tools | http
    environment: str = ""
    environment_options: dict[str, Any] = field(default_factory=dict)  # arguments of the object
    environment_workers: Count = 1  # processes that hold the open environment objects
    environment_s: Positive = 120.0  # of each answer of an object; then the episode has failed
    # Tools in a sandbox that an object may offer; a box for each episode that calls one
    tools: list[ToolName] = field(default_factory=list)
    tool_s: Positive = 20.0  # of each call; then it is ended, and the policy is told
    agent: AgentConfig = field(default_factory=AgentConfig)  # a program instead of an environment
    # Limits of an episode.  0 = 1 turn for a single answer, 64 for programs and objects
    max_turns: Natural = 0
    max_sampled_tokens: Natural = 0  # of all turns; 0 = 65,536 for programs and objects, else none
    context_tokens: Natural = 0  # of prompt and answer of a turn; 0 = what the model takes
    # Then it is ended, and the episode has failed; 0 = 3600 for programs and objects, else none
    wall_s: NonNegative = 0.0
    # SGLang's names of parsers of tool calls and reasoning; empty = they stay text
    call_format: str = ""
    reasoning_format: str = ""

    @property
    def kind(self) -> TaskKind:
        """Player of the episodes; a program comes before an environment."""
        has_program = self.agent.command or self.agent.port
        return TaskKind.PROGRAM if has_program else kind_of_environment(self.environment)

    @property
    def brings_reward(self) -> bool:
        """Whether the program or the environment object gives the reward, or a term of it."""
        if self.rewards:
            return any(term.where == "own" for term in self.rewards)
        return self.kind.uses_chat and not self.reward

    @property
    def terms(self) -> tuple[RewardTerm, ...]:
        """The terms of the reward; `reward` alone is one."""
        if self.rewards:
            return tuple(self.rewards)
        if self.brings_reward:
            return (RewardTerm("reward", where="own"),)
        own = RewardTerm("reward", function=self.reward, workers=self.scorer_workers)
        return (replace(own, needs=["text", "messages", "tokens", "graph"]),)

    def timeout_of(self, term: RewardTerm) -> float:
        """Seconds of a request to the scorer of a term."""
        return term.timeout_s or self.score_timeout_s

    def only_with(self, term: RewardTerm) -> Self:
        """The task with the function of this term as its reward."""
        return replace(self, reward=term.function, rewards=[])

    @property
    def own_rewards(self) -> list[Self]:
        """The task with each function of the user that gives its reward, or a term of it."""
        terms = [term for term in self.terms if term.where == "function" and ":" in term.function]
        return [self.only_with(term) for term in terms]

    @property
    def turn_limit(self) -> int:
        return self.max_turns or (1 if self.kind is TaskKind.SINGLE_ANSWER else 64)

    @property
    def sampled_limit(self) -> int:
        """Tokens; 0 = none."""
        return self.max_sampled_tokens or (65536 if self.kind.uses_chat else 0)

    @property
    def wall_limit_s(self) -> float:
        """0 = none."""
        return self.wall_s or (3600.0 if self.kind.uses_chat else 0.0)


@dataclass(frozen=True)
class SamplingConfig:
    temperature: Positive = 1.0
    top_p: Share = 1.0
    top_k: int = -1  # -1 = no limit; a truncating recipe without one gets mask_top_k
    min_p: BelowOne = 0.0
    max_new_tokens: Count = 64
    ignore_eos: bool = False
    mask_top_k: int = 512  # bound applied to a truncating recipe that names no finite top_k

    @property
    def truncates(self) -> bool:
        """As `moerl.core.types.SamplingParams.truncates`."""
        return self.top_p < 1.0 or self.top_k != -1 or self.min_p > 0.0


@dataclass(frozen=True)
class ForkConfig:
    """Other continuations of an answer, from some of its tokens on (docs/scoring.md)."""

    pivots: Natural = 0  # most of an answer; 0 = no forks
    continuations: Annotated[int, Meta(ge=2)] = 4  # of each pivot
    every: Natural = 0  # tokens between pivots; 0 = a pivot behind each separator
    separator: str = "\n\n"  # text that ends a step


@dataclass(frozen=True)
class RolloutConfig:
    groups_per_step: Count = 32
    group_size: Count = 8  # trained episodes per prompt
    oversample: Count = 1  # times group_size are generated, resampled on correct (GRPO-RoC)
    max_lag: Natural = 4  # versions: no trained token is older than this
    buffer_depth: Natural = 2  # batches of finished groups to hold; 0 = synchronous
    # Groups that start: bounded by buffer_depth, or as many as engines take; then groups that are
    # too old at their turn are rejected
    admission: Literal["bounded", "unbounded"] = "bounded"
    max_groups_in_flight: Count = 64  # over all engines
    # An episode that has sampled this many tokens continues after a death of the controller, from
    # its last reply; 0 = every episode, -1 = none
    journal_tokens: Annotated[int, Meta(ge=-1)] = 2048
    # A prompt goes to the engine that has cached at least half of it (and 64 tokens), unless that
    # engine has this many groups more than the least busy one; -1 = always the least busy one
    prefix_slack: Annotated[int, Meta(ge=-1)] = 2
    # Running requests at a publish (docs/tuning.md): drain waits for them, in_place keeps their
    # old KV cache, retract has the engine compute it again
    in_flight_mode: Literal["abort_resume", "drain", "in_place", "retract"] = "abort_resume"
    # Order of training; strict: in the order of the prompts
    selection: Literal["oldest", "freshest", "strict"] = "oldest"
    # Exactly this lag (`resolve` then sets the fields it needs); -1 = bounded by max_lag
    fixed_lag: Annotated[int, Meta(ge=-1)] = -1
    slice_tokens: Natural = 0  # most tokens of a rollout per engine call; 0 = up to its end
    group_quorum: Natural = 0  # a group closes when this many siblings are done; 0 = all
    # Rows of an episode; join: one, split: another where the weights change, separate: one per turn
    turn_rows: Literal["join", "split", "separate"] = "join"
    # Unfinished siblings then; carry: they finish and are trained in a later step
    late_siblings: Literal["drop", "carry"] = "drop"
    drop_zero_variance: bool = False  # DAPO dynamic sampling: groups of equal rewards are replaced
    max_drop_batches: Natural = 4  # after this many dropped batches in one step, groups are kept
    # Requests of an engine that neither prefills nor samples for this long are aborted; what they
    # have sampled is kept.  No limit holds for a whole request
    progress_timeout_s: Positive = 600.0
    drain_timeout_s: Positive = 600.0  # longest wait of an update with in_flight_mode=drain
    # Groups in generation with a token older than this many versions are cancelled and generated
    # again; -1 = max_lag, beyond which no group is trained
    cancel_lag: Annotated[int, Meta(ge=-1)] = -1
    # A sibling that is too old for the next step costs its group, or is dropped from it; its reward
    # still counts in the baseline if it has one
    stale_siblings: Literal["group", "drop"] = "group"
    forks: ForkConfig = field(default_factory=ForkConfig)
    # Node-local folder of the controller's journal; empty = the run directory
    journal_dir: UserPath = ""
    # Failures that the journal survives; node: loss of every process, shared: also loss of a node
    durability: Literal["node", "shared"] = "node"


@dataclass(frozen=True)
class ReplayConfig:
    """Keep Routing and Keep Sampling Mask; both on by default, never silently off."""

    # R3: the engine's routes, R2: the proximal policy's own
    routing: Literal["R3", "R2", "off"] = "R3"
    sampling_mask: bool = True
    audit: bool = False  # also keep the re-prefilled rows of resumed segments
    probe: Natural = 20  # steps between consistency probes of a microbatch; 0 = never


@dataclass(frozen=True)
class EngineConfig:
    count: Count = 1
    platform: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    tp: Count = 1
    tp_each: list[int] = field(default_factory=list)  # tp of each engine, replaces tp
    nodes: Count = 1  # nodes that each engine spans; its ranks divide over them
    max_running_requests: Count = 256
    # of the KV cache; 0 = as many as fit into mem_fraction_static, SGLang decides
    max_total_tokens: Natural = 65536
    # For weights and KV cache: of what is free at the start (on a CPU without max_total_tokens
    # only), with cluster.colocated=shared of the whole GPU
    mem_fraction_static: Share = 0.2
    start_timeout_s: Positive = 300.0
    answer_timeout_s: Positive = 120.0  # a server that answers nothing for so long is restarted
    cpu_threads: Count = 1
    host: str = "127.0.0.1"
    args: dict[str, Any] = field(
        default_factory=dict
    )  # any SGLang server argument, by its field name

    @property
    def sizes(self) -> dict[int, int]:
        """Tensor-parallel ranks by engine; engines that join later may differ."""
        each = self.tp_each or [self.tp] * self.count
        return dict(enumerate(each))

    @property
    def ep(self) -> int:
        """Ranks of an engine that share its experts."""
        return int(self.args.get("ep_size") or 1)

    @property
    def attention_dp(self) -> int:
        """Ranks of an engine that attend to requests of their own."""
        return int(self.args.get("attn_dp_size") or 1)


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the mesh axes.  Experts share the ranks of tp x cp x dp within a pipeline stage.

    Example: 8 layers, pp 2, vpp 2: stage 0 has chunks (0, 1) and (4, 5), stage 1 (2, 3) and (6, 7).
    """

    tp: Count = 1
    pp: Count = 1
    cp: Count = 1
    ep: Count = 1
    etp: Count = 1
    dp: Count = 1
    vpp: Count = 1  # model chunks per pipeline stage (interleaved schedule)
    first_stage_layers: Natural = 0  # 0 = as many as the other stages; for numbers that pp does not
    last_stage_layers: Natural = 0  # divide, and for stages that also hold embedding or head
    vocab_divisible_by: Count = 128  # Megatron's make_vocab_size_divisible_by

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pp


@dataclass(frozen=True)
class OptimizerConfig:
    lr: NonNegative = 1e-3
    min_lr: NonNegative = 1e-3  # end of the decay; a lower lr stays unchanged
    warmup_steps: Natural = 0
    decay_style: Literal["constant", "linear", "cosine"] = "constant"
    decay_steps: Natural = 0  # 0 = run.steps
    weight_decay: NonNegative = 0.0
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    eps: Positive = 1e-8
    clip_grad: NonNegative = 1.0
    distributed: bool = False  # Megatron's distributed optimizer (ZeRO-1)


@dataclass(frozen=True)
class TrainerConfig:
    dtype: Precision = "fp32"
    platform: Literal["auto", "cpu", "cuda"] = "auto"
    # Whose layers: megatron-core's own, or on CUDA Transformer Engine's; auto: those on CUDA
    transformer_impl: TransformerImpl = "auto"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    max_tokens_per_microbatch: Count = 8192  # per data-parallel rank, padding counted
    minibatches: Count = 1  # optimizer steps per batch; it divides rollout.groups_per_step
    packing: bool = False  # rollouts end to end (THD) instead of padded rows
    # Batches in a row whose loss or gradient is not finite: their optimizer step is not taken; one
    # more ends the run
    skip_bad_steps: Natural = 0
    # With packing: a prompt, or first turns, that rows of a group share are forwarded once
    share_prompts: bool = False
    dispatcher: Dispatcher = "alltoall"
    cpu_threads: Count = 1  # of a rank; an offloaded optimizer uses its share of the node's cores
    megatron: dict[str, Any] = field(default_factory=dict)  # any TransformerConfig field
    # Of DistributedDataParallelConfig and OptimizerConfig: `moerl.config.optimizer_settings`
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    step_timeout_s: Positive = 1800.0  # longest wait for a batch or a peer


@dataclass(frozen=True)
class TeacherConfig:
    """A policy that the trained one learns from: a folder, or an earlier version of itself."""

    name: str = "teacher"  # in metrics; of several teachers each has its own
    path: UserPath = ""  # Hugging Face folder with the student's vocabulary
    # policy: at version v of the policy, its newest version that is a multiple of `every` and at
    # most v - lag
    follows: Literal["", "policy"] = ""
    lag: Natural = 0  # versions
    every: Count = 1  # versions between two exchanges
    # Mean of the versions at multiples of `every`: ema x mean + (1 - ema) x weights; 0 = no mean
    ema: BelowOne = 0.0
    tasks: list[str] = field(default_factory=list)  # labels of its tasks; empty = all
    weight: Positive = 1.0  # of its term, times algorithm.distill_coef


@dataclass(frozen=True)
class AlgorithmConfig:
    """Parts of the loss by name (docs/algorithms.md); a setting that no part reads is refused."""

    advantage: str = "grpo_mean"  # reward minus group mean (Dr.GRPO, DeepSeek-V3.2)
    gae_gamma: UnitInterval = 1.0
    gae_lambda: UnitInterval = 1.0
    # gae: lr of the critic, whose other optimizer settings are the policy's
    critic_lr: NonNegative = 1e-3
    objective: str = "ppo_clip"
    # Denominator of the ratio; proximal: the policy at the start of the batch
    ratio: Literal["engine", "proximal"] = "engine"
    corrections: list[str] = field(default_factory=list)  # against the engine's log-probability
    # Score centering: the loss loses its expected gradient under the engine's distribution
    centering: bool = False
    # Likeliest entries that the engine records per token where sampling does not truncate
    centering_top_k: Count = 64
    kl: str = "off"  # estimator of the KL to a reference policy
    kl_coef: NonNegative = 0.0
    # reinforce_pp, gae: weight of a KL inside the reward of each token
    reward_kl_coef: NonNegative = 0.0
    reference: UserPath = ""  # Hugging Face folder of the reference; empty = model.path
    teachers: list[TeacherConfig] = field(default_factory=list)  # of on-policy distillation
    # token: weight of teacher less student log-probability in the advantage; else of the KL
    distill_coef: NonNegative = 0.0
    # token: the sampled one; support: the recorded sampling mask; teacher_top_k: its likeliest
    distill_over: Literal["token", "support", "teacher_top_k"] = "token"
    distill_kl: Literal["reverse", "forward"] = "reverse"  # reverse: KL(policy, teacher)
    distill_top_k: Count = 64  # teacher_top_k: entries of the vocabulary per token
    entropy_coef: NonNegative = 0.0
    aggregation: str = "seq_mean_token_mean"
    clip_low: NonNegative = 0.2
    clip_high: NonNegative = 0.28
    dual_clip: float = 3.0
    sapo_tau_pos: NonNegative = 1.0
    sapo_tau_neg: NonNegative = 1.05
    kimi_tau: NonNegative = 0.1
    dppo_cap: NonNegative = 20.0
    tis_cap: Positive = 2.0
    icepop_low: float = 0.5
    icepop_high: Limit = 5.0
    mis_token_low: float = 0.5
    mis_token_high: Limit = 2.0
    mis_sequence_low: float = 0.5
    mis_sequence_high: Limit = 2.0
    mis_geometric_low: float = 0.999
    mis_geometric_high: Limit = 1.001
    off_policy_delta: NonNegative = 0.0  # opsm: nats per token, mean over a sequence
    lag_cap: Natural = 0  # lag: versions
    lag_decay_base: Share = 0.9  # lag_decay: weight of a token that is one version old
    m2_limit: Positive = 0.04  # m2: largest mean of (proximal - engine)^2 over the batch, nats^2
    dpo_beta: Positive = 0.1  # online_dpo: scale of log-probability gains in the preference
    constant_tokens: Natural = 0  # constant: the denominator, times the number of episodes
    # DAPO: tokens before the limit in which the penalty grows; 0 = off
    overlong_buffer: Natural = 0
    mask_truncated: bool = False  # answers cut by the length limit get advantage 0


@dataclass(frozen=True)
class RefModelsConfig:
    """Placement of the models that only score: algorithm.reference, algorithm.teachers."""

    # trainer: on its ranks, before each step; separate: on their own ranks
    placement: Literal["trainer", "separate"] = "trainer"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # separate: their layout


TransportName = Literal["auto", "shm", "cuda_ipc", "gloo", "nccl", "mooncake", "disk"]
SAME_MACHINE = ("shm", "cuda_ipc")  # transports that end at the machine


@dataclass(frozen=True)
class SyncConfig:
    transport: TransportName = "auto"  # by the cluster: `moerl.config.transport_rules`
    # auto: rdma where every engine and trainer node names its cards in cluster.nodes.*.rdma
    mooncake_protocol: Literal["auto", "rdma", "tcp"] = "auto"
    bucket_bytes: Annotated[int, Meta(ge=1024)] = 16 * 2**20
    # Engines that the trainer sends to, the others copy from them; 0 = all
    direct: Natural = 0
    timeout_s: Positive = 120.0  # longest publish session; a slower engine stays at its version
    folder: UserPath = ""  # disk: mounted by trainer and engines under this same path
    delta: bool = False  # send only changed words, compressed; for links slower than zstd
    quorum: Count = 1  # engines that must take a version; max_restarts misses in a row are allowed


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out prompts, answered by the run's own engines under one version at a time."""

    every: Natural = 0  # versions between evaluations, the first one (0) included; 0 = never
    prompts: Count = 64
    samples: Count = 1  # per prompt
    temperature: NonNegative = 0.0  # 0 = greedy
    top_p: Share = 1.0
    top_k: int = -1  # -1 = no limit; a truncating evaluation needs one
    path: UserPath = ""  # jsonl: file of held-out prompts; other tasks draw them with another seed
    split: str = ""  # of path, or without path of task.path
    max_requests: Count = 16  # requests, or episodes of agents, of an evaluation at once
    hold_s: Positive = 30.0  # longest time that an evaluation delays an update of its engine


@dataclass(frozen=True)
class CheckpointConfig:
    # Weights to begin with: a run, one of its checkpoints, or a torch_dist folder of Megatron-LM;
    # config.json and tokenizer are those of model.path.  Empty: those of model.path
    start: UserPath = ""
    every: Natural = 50  # batches; 0 = only at the end
    keep: Count = 2  # newest
    # metric of the best checkpoint, which is kept too: its mean since the previous checkpoint, or,
    # for eval/*, the evaluation of exactly these weights
    best: str = ""
    best_is: Literal["highest", "lowest"] = "highest"
    # When hf/ is written: at the end, with every checkpoint too (replacing the one before), never;
    # tools/megatron_to_hf.py makes the same folder of any checkpoint
    hf: Literal["end", "every", "off"] = "end"
    keep_versions: bool = False  # also save HF weights of every published version (audit)


@dataclass(frozen=True)
class StreamConfig:
    """What was trained, in runs/NAME/stream, for `moerl verify` and `moerl rerun`."""

    # Newest steps whose groups and records are kept; -1 = all, 0 = no stream is written
    keep_steps: Annotated[int, Meta(ge=-1)] = 0


@dataclass(frozen=True)
class SftConfig:
    """What `moerl sft` trains."""

    # off: the model, on answers; bce, mse: a value head and the model below it, on labelled steps
    value_head: Literal["off", "bce", "mse"] = "off"


@dataclass(frozen=True)
class SupervisionConfig:
    """Reactions to the death of the trainer, an engine, the scorer or the controller."""

    # Restarts of one process without a new step in between; 0 = end the run at once
    max_restarts: Natural = 3
    # Deaths of one engine within window_s of its own running time that exclude it from the run
    max_deaths: Count = 5
    window_s: Positive = 1800.0
    backoff_s: NonNegative = 1.0  # wait before a restart, doubled per death within window_s
    # Longest silence of the controller or an engine host; it is then ended and started again
    answer_timeout_s: Positive = 60.0
    lease_s: Positive = (
        60.0  # nodes leave a run whose root process gave no sign of life for so long
    )


@dataclass(frozen=True)
class ObserveConfig:
    tensorboard: bool = False
    wandb_project: str = ""  # empty = off
    trackio_project: str = ""  # empty = off
    prometheus_port: Natural = 0  # serves the newest metrics behind the run's token; 0 = off
    report_s: NonNegative = 60.0  # between pages of report.html in training; 0 = at the end only
    # Steps between measurements of the entropy over the whole vocabulary; 0 = never
    full_entropy: Natural = 20
    sample_rollouts: Natural = 16  # rollouts with text kept for the report
    engine_alone_s: NonNegative = 0.0  # measure the engines alone for this time at the end; 0 = off


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of one kind: `cluster.nodes.NAME`."""

    roles: Annotated[list[Role], Meta(min_length=1)] = field(default_factory=list)
    count: Count = 1
    hosts: list[str] = field(default_factory=list)  # their addresses; empty: from the scheduler
    devices: Natural = 0  # GPUs of one node; 0 = none, then any number of ranks shares its cores
    device_gb: NonNegative = 0.0  # memory of one GPU, 1e9 bytes; 0 = unknown
    memory_gb: NonNegative = 0.0  # host memory of one node, 1e9 bytes; 0 = unknown
    rdma: list[str] = field(default_factory=list)  # RDMA cards, device by device; empty: NCCL's


@dataclass(frozen=True)
class PortConfig:
    """Ports that other nodes connect to; 0 = a free one, for clusters of one machine only."""

    controller: int = 0  # trainer rank 0 -> controller
    blobs: int = 0  # trainer ranks -> records on an engine node
    ray: int = 0  # engine nodes -> Ray's head
    rendezvous: int = 0  # torchrun of the trainer nodes
    ref_models: int = (
        0  # torchrun of the reference ranks' nodes, with ref_models.placement: separate
    )


@dataclass(frozen=True)
class ClusterConfig:
    name: str = "laptop"
    # local: one machine (docs/clusters.md)
    launcher: Literal["local", "hosts", "slurm", "kuberay"] = "local"
    interface: str = "lo"  # network interface of trainer, engines and sync groups, on every node
    address: str = "127.0.0.1"  # address to bind to; empty: the node's address on `interface`
    blob_dir: UserPath = "/dev/shm"  # node-local: records wait here for the trainer
    ray: str = ""  # join this Ray cluster, HOST:PORT; empty: moerl train starts one
    nodes: dict[str, NodeGroup] = field(default_factory=dict)
    ports: PortConfig = field(default_factory=PortConfig)
    # shared: engines and trainer are on the same GPUs, each in its share (docs/clusters.md)
    # turns: they take turns with the memory (docs/colocated.md)
    colocated: Literal["none", "shared", "turns"] = "none"
    # for all processes: NCCL_*, UCX_*; a value that is a secret: ${oc.env:WANDB_API_KEY}
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    firewall: bool = False  # tools/launch/firewall.sh is in force on all nodes; moerl doctor looks
    remote: str = ""  # command that runs another on {host}, for moerl doctor: ssh {host}
    slurm: dict[str, str] = field(default_factory=dict)  # options of sbatch: partition, account


ParkedPart = Literal["gradients", "kv_cache", "engine_weights", "optimizer", "trainer_weights"]


@dataclass(frozen=True)
class TurnConfig:
    """Turns of engines and trainer, with cluster.colocated: turns."""

    budget_s: Positive = 600.0  # of generation without a batch, after which the turn is late
    moves: list[ParkedPart] = field(default_factory=list)  # what gives way; empty: the plan decides


_NO_STEP = "without a step, `moerl eval` evaluates a model"


@dataclass(frozen=True)
class RunConfig:
    name: str = ""  # empty = recipe name and time
    root: UserPath = "runs"
    seed: Natural = 0
    steps: Annotated[int, Meta(ge=1, description=_NO_STEP)] = 100
    console: Literal["auto", "panel", "lines", "quiet"] = "auto"


@dataclass(frozen=True)
class Config:
    """The whole resolved configuration of a run; saved as runs/NAME/config.yaml."""

    include: list[str] = field(default_factory=list)  # YAML files merged below this one, in order
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    # Several tasks: {label: NAME, weight: 2, ...} and what differs from task and sampling
    tasks: list[dict[str, Any]] = field(default_factory=list)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)  # low-rank adapters in place of weights
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    ref_models: RefModelsConfig = field(default_factory=RefModelsConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    turn: TurnConfig = field(default_factory=TurnConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def update_wait_s(self) -> float:
        """Longest time that requests delay a weight update of their engine."""
        drain = self.rollout.drain_timeout_s if self.rollout.in_flight_mode == "drain" else 0.0
        return drain + (self.evaluation.hold_s if self.evaluation.every else 0.0)
