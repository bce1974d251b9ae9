"""The table of algorithms: one line each, with the settings it reads and the data it needs.

A line names the function below `moerl.algorithms`; adding an algorithm is that function and its
line here.  An objective may also be a user's own `package.module:function`.  The table is plain
data without torch, so that a dry run on a login node can refuse, before anything starts, a setting
that no algorithm reads or data that no component provides.

Rejected: a decorator at the function (the check would import torch), a second table in that
package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from moerl.config.functions import check_importable
from moerl.config.rules import Rows, refuse
from moerl.config.schema import AlgorithmConfig, Config, TeacherConfig
from moerl.config.task_kinds import TaskKind
from moerl.config.task_mixture import TaskEntry, entries_of, naming
from moerl.config.task_tables import STEP_REWARDS
from moerl.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Entry:
    """One algorithm."""

    function: str  # module:function below moerl.algorithms
    reads: tuple[str, ...] = ()  # fields of AlgorithmConfig
    needs: tuple[
        str, ...
    ] = ()  # beyond a plain step: engine_ratio, steps, critic, reference, proximal_pass
    reweighs: bool = False  # its ratio, or its weight, changes the measure tokens are drawn from


def _table(**entries: Entry) -> Mapping[str, Entry]:
    return MappingProxyType(entries)


_REWARD = ("overlong_buffer", "mask_truncated")  # read with the reward, by every advantage
ADVANTAGES = _table(
    grpo_mean=Entry("advantages:grpo_mean"),
    grpo_std=Entry("advantages:grpo_std"),
    rloo=Entry("advantages:rloo"),
    reinforce_pp=Entry("advantages:reinforce_pp", ("reward_kl_coef",)),
    reinforce_pp_baseline=Entry("advantages:reinforce_pp_baseline"),
    reward=Entry("advantages:raw_reward"),
    none=Entry("advantages:no_reward"),
    gae=Entry(
        "advantages:gae", ("gae_gamma", "gae_lambda", "critic_lr", "reward_kl_coef"), ("critic",)
    ),
    online_dpo=Entry(
        "preference:pair_advantages", ("dpo_beta", "reference"), ("reference", "proximal_pass")
    ),
    process_mean=Entry("advantages:process_mean", needs=("steps",)),
    process_std=Entry("advantages:process_std", needs=("steps",)),
    vine=Entry("fork_advantages:plan_vine", needs=("forks",)),
)
_COMPARES_SIBLINGS = (
    *("grpo_mean", "grpo_std", "rloo", "reinforce_pp_baseline", "online_dpo"),
    *("process_mean", "process_std", "vine"),
)
_CLIP = ("clip_low", "clip_high")
OBJECTIVES = _table(
    ppo_clip=Entry("objectives:ppo_clip", _CLIP, reweighs=True),
    ppo_dual_clip=Entry("objectives:ppo_dual_clip", (*_CLIP, "dual_clip"), reweighs=True),
    gspo=Entry("objectives:gspo", _CLIP, reweighs=True),
    gspo_token=Entry("objectives:gspo_token", _CLIP, reweighs=True),
    gmpo=Entry("objectives:gmpo", _CLIP, reweighs=True),
    cispo=Entry("objectives:cispo", _CLIP, reweighs=True),
    sapo=Entry("objectives:sapo", ("sapo_tau_pos", "sapo_tau_neg"), reweighs=True),
    topr=Entry("objectives:topr", reweighs=True),
    topr_token=Entry("objectives:topr_token", reweighs=True),
    kimi=Entry("objectives:kimi", ("kimi_tau",), reweighs=True),
    kimi_token=Entry("objectives:kimi_token", ("kimi_tau",), reweighs=True),
    dppo_tv=Entry("objectives:dppo_tv", (*_CLIP, "dppo_cap"), ("engine_ratio",), True),
    dppo_kl=Entry("objectives:dppo_kl", (*_CLIP, "dppo_cap"), ("engine_ratio",), True),
    importance=Entry("objectives:importance", reweighs=True),
    reinforce=Entry("objectives:reinforce"),
)
# Assumed of a user's own objective: it has a ratio and may read every setting.
_OWN_OBJECTIVE = Entry("", tuple(item.name for item in fields(AlgorithmConfig)), reweighs=True)
CORRECTIONS = _table(
    importance=Entry("corrections:importance", reweighs=True),
    tis_token=Entry("corrections:tis_token", ("tis_cap",), reweighs=True),
    tis_sequence=Entry("corrections:tis_sequence", ("tis_cap",), reweighs=True),
    tis_geometric=Entry("corrections:tis_geometric", ("tis_cap",), reweighs=True),
    icepop=Entry("corrections:icepop", ("icepop_low", "icepop_high"), reweighs=True),
    mis_token=Entry("corrections:mis_token", ("mis_token_low", "mis_token_high")),
    mis_sequence=Entry("corrections:mis_sequence", ("mis_sequence_low", "mis_sequence_high")),
    mis_geometric=Entry("corrections:mis_geometric", ("mis_geometric_low", "mis_geometric_high")),
    opsm=Entry("corrections:opsm", ("off_policy_delta",)),
    lag=Entry("corrections:lag", ("lag_cap",)),
    lag_decay=Entry("corrections:lag_decay", ("lag_decay_base",)),
    m2=Entry("corrections:m2", ("m2_limit",), ("proximal_pass",)),
)
KLS = _table(
    k1=Entry("kl:k1", ("kl_coef", "reference"), ("reference",)),
    k2=Entry("kl:k2", ("kl_coef", "reference"), ("reference",)),
    k3=Entry("kl:k3", ("kl_coef", "reference"), ("reference",)),
    k3_plus=Entry("kl:k3_plus", ("kl_coef", "reference"), ("reference",)),
    unbiased=Entry("kl:unbiased", ("kl_coef", "reference"), ("reference",)),
)
AGGREGATIONS = _table(
    token_mean=Entry("aggregation:token_mean"),
    seq_mean_token_mean=Entry("aggregation:seq_mean_token_mean"),
    seq_mean_token_sum=Entry("aggregation:seq_mean_token_sum"),
    constant=Entry("aggregation:constant", ("constant_tokens",)),
)
_SWITCHES = {
    "centering_top_k": "centering",
    "distill_kl": "distill_over=support or teacher_top_k",
    "distill_top_k": "distill_over=teacher_top_k",
}
_BY_AGE = ("lag", "lag_decay")  # corrections that know nothing of a token's probability
# Objectives whose gradient is A grad log p while theta is the proximal policy
_ONE_AT_FIRST = ("ppo_clip", "ppo_dual_clip", "cispo", "importance")
_UNBOUNDED = 1e30
_NAME = re.compile(r"[A-Za-z][\w-]*")  # of a teacher: a part of metric names and a folder
_ROLES = ("reference", "proximal")  # other policies that score
_ALWAYS_READ = frozenset(
    {"advantage", "objective", "ratio", "corrections", "kl", "aggregation", "entropy_coef"}
    | {"distill_coef", "centering"}
    | set(_REWARD)
)


@dataclass(frozen=True, slots=True)
class RatioRule:
    """The weight of a token as a function of x = theta / engine: 1, x in bounds or bounded, or x.

    Bounds (low, high) where the advantage is above 0, and where it is not.
    """

    kind: Literal["none", "clamped", "masked", "plain"]
    positive: tuple[float, float] = (0.0, _UNBOUNDED)
    negative: tuple[float, float] = (0.0, _UNBOUNDED)

    @classmethod
    def of(cls, a: AlgorithmConfig) -> RatioRule | None:
        """None: the weight depends on more than x, or nobody has shown that it does not."""
        weighing = tuple(name for name in a.corrections if name not in _BY_AGE)
        if a.objective == "reinforce" or (a.ratio == "proximal" and a.objective in _ONE_AT_FIRST):
            cap, pop = (0.0, a.tis_cap), (a.icepop_low, a.icepop_high)
            return {
                (): cls("none"),
                ("importance",): cls("plain"),
                ("tis_token",): cls("clamped", cap, cap),
                ("icepop",): cls("masked", pop, pop),
            }.get(weighing)
        low, high = 1.0 - a.clip_low, 1.0 + a.clip_high
        return (
            None
            if weighing
            else {
                "importance": cls("plain"),
                "cispo": cls("clamped", (low, high), (low, high)),
                "ppo_clip": cls("masked", (0.0, high), (low, _UNBOUNDED)),
                "ppo_dual_clip": cls("masked", (0.0, high), (low, a.dual_clip)),
            }.get(a.objective)
        )


def check_algorithm(config: Config, *, folders: bool = True) -> None:
    """Every rule about `algorithm`: names, settings that are not read, data that is not provided.

    folders: require the folders of the reference models, and load an objective of the user.
    Raises ConfigError naming the field, its value and the allowed values.
    """
    a = config.algorithm
    chosen = _chosen(a)
    refuse(config, _names_and_needs(config, chosen))
    refuse(config, chain(_values(config), _measure(a), _centering(config), _teachers(config)))
    refuse(config, chain(_distillation(config), _role_rows(config), _forks(config)))
    if folders:
        refuse(config, _folders(a))
        if a.objective not in OBJECTIVES:
            check_importable("algorithm.objective", a.objective, list(OBJECTIVES))


def needed(a: AlgorithmConfig) -> set[str]:
    """Needs of the chosen algorithms beyond a plain step (`Entry.needs`)."""
    in_reward = {"reference", "proximal_pass"} if a.reward_kl_coef else set()
    return {need for line in _chosen(a) for need in line.needs} | in_reward


def ref_models_of(config: Config) -> dict[str, str]:
    """Hugging Face folder of each reference model that the algorithm needs, by role."""
    algorithm, found = config.algorithm, {}
    if "reference" in needed(algorithm) and not base_is_reference(config):
        found["reference"] = algorithm.reference or config.model.path
    for teacher in teachers_of(algorithm):
        if not borrows_policy(config, teacher):
            found[teacher.name] = teacher.path or config.model.path
    return found


def teachers_of(a: AlgorithmConfig) -> list[TeacherConfig]:
    """The teachers that the loss reads."""
    return a.teachers if a.distill_coef else []


def followers_of(a: AlgorithmConfig) -> dict[str, TeacherConfig]:
    """Teachers that follow the policy, by name."""
    return {teacher.name: teacher for teacher in teachers_of(a) if teacher.follows}


def ref_field(role: str) -> str:
    """The setting of a model that only scores, for messages."""
    return "algorithm.reference" if role == "reference" else f"algorithm.teachers.{role}"


def borrows_policy(config: Config, teacher: TeacherConfig) -> bool:
    """Whether a teacher is the trained model with the adapters of another version."""
    on_trainer = config.ref_models.placement == "trainer"
    return bool(teacher.follows) and config.lora.rank > 0 and on_trainer


def base_is_reference(config: Config) -> bool:
    """Whether the trained model with its adapters off is the reference: no other model is loaded.

    That is the folder `model.path`.  A folder of its own, or separate ranks, make another model.
    """
    algorithm = config.algorithm
    is_base = not algorithm.reference and config.ref_models.placement == "trainer"
    return config.lora.rank > 0 and is_base and "reference" in needed(algorithm)


def _chosen(a: AlgorithmConfig) -> list[Entry]:
    return [
        entry("algorithm.advantage", a.advantage, ADVANTAGES),
        entry("algorithm.objective", a.objective, OBJECTIVES),
        entry("algorithm.aggregation", a.aggregation, AGGREGATIONS),
        *(entry("algorithm.corrections", name, CORRECTIONS) for name in a.corrections),
        *([entry("algorithm.kl", a.kl, KLS)] if a.kl != "off" else []),
    ]


def entry(field: str, name: str, table: Mapping[str, Entry]) -> Entry:
    """The line called `name`.  Raises ConfigError that lists the known names."""
    if name in table:
        return table[name]
    known = f"known names are {', '.join(sorted(table))}"
    if table is not OBJECTIVES:
        raise ConfigError(field, name, known)
    module, _, function = name.partition(":")
    if not (module and function):
        raise ConfigError(field, name, f"{known}; or give package.module:function")
    return replace(_OWN_OBJECTIVE, function=name)


def _folders(a: AlgorithmConfig) -> Rows:
    found = {f"{ref_field(t.name)}.path": t.path for t in teachers_of(a) if t.path}
    found |= {"algorithm.reference": a.reference} if a.reference else {}
    for field, folder in found.items():
        if not Path(folder, "config.json").is_file():
            yield field, folder, "a Hugging Face model folder is needed"


def _names_and_needs(config: Config, chosen: list[Entry]) -> Rows:
    a = config.algorithm
    if len(set(a.corrections)) != len(a.corrections):
        yield "algorithm.corrections", "name each correction once"
    read, default = _read(a, chosen), AlgorithmConfig()
    for item in fields(a):
        if item.name not in read and getattr(a, item.name) != getattr(default, item.name):
            readers = ", ".join(_readers(item.name)) or _SWITCHES.get(item.name, "distill_coef")
            allowed = f"nothing that is configured reads it; {readers} would"
            yield f"algorithm.{item.name}", allowed
    if "engine_ratio" in needed(a) and a.ratio != "engine":
        yield "algorithm.ratio", f"{a.objective} is defined against the engine; use engine"
    for entry in entries_of(config) if "steps" in needed(a) else ():
        with naming(entry):
            refuse({"task": entry}, _steps(entry, a))
    if a.kl != "off" and a.kl_coef == 0:
        yield "algorithm.kl_coef", 0, f"algorithm.kl={a.kl} needs a number above 0"


def _read(a: AlgorithmConfig, chosen: list[Entry]) -> frozenset[str]:
    """Fields of AlgorithmConfig that something reads."""
    read = _ALWAYS_READ | {name for line in chosen for name in line.reads}
    read |= {"teachers", "distill_over"} if a.distill_coef else set()
    read |= {"distill_kl"} if exact_distillation(a) else set()
    read |= {"distill_top_k"} if a.distill_over == "teacher_top_k" else set()
    read |= {"centering_top_k"} if a.centering else set()
    return read | ({"reference"} if a.reward_kl_coef else set())


def _readers(field: str) -> list[str]:
    """Algorithms that read a field of AlgorithmConfig."""
    tables = (ADVANTAGES, OBJECTIVES, CORRECTIONS, KLS, AGGREGATIONS)
    lines = (line for table in tables for line in table.items())
    return sorted(name for name, line in lines if field in line.reads)


def _steps(task: TaskEntry, a: AlgorithmConfig) -> Rows:
    functions = [term.function for term in task.rewards] or [task.reward]
    by_terms = any(term.unit in ("step", "turn") for term in task.rewards)
    if not by_terms and not any(one in STEP_REWARDS or ":" in one for one in functions):
        yield (
            "task.reward",
            f"algorithm.advantage={a.advantage} needs a reward per step: use "
            f"{', '.join(STEP_REWARDS)}, package.module:function that returns steps, or a term of "
            "task.rewards with unit=step or turn (docs/algorithms.md)",
        )


def _values(config: Config) -> Rows:
    a = config.algorithm
    for name in ("icepop", "mis_token", "mis_sequence", "mis_geometric"):
        if not 0 <= getattr(a, f"{name}_low") <= getattr(a, f"{name}_high"):
            yield f"algorithm.{name}_low", f"use 0 up to algorithm.{name}_high"
    if "opsm" in a.corrections and a.off_policy_delta <= 0:
        yield "algorithm.off_policy_delta", "opsm needs a number above 0"
    if a.objective == "ppo_dual_clip" and a.dual_clip <= 1 + a.clip_high:
        yield "algorithm.dual_clip", "it must exceed 1 + algorithm.clip_high"
    if a.aggregation == "constant" and a.constant_tokens < 1:
        yield "algorithm.constant_tokens", "aggregation constant needs at least 1"
    shortest = min(entry.sampling.max_new_tokens for entry in entries_of(config))
    if a.overlong_buffer > shortest:
        yield "algorithm.overlong_buffer", f"it lies inside sampling.max_new_tokens = {shortest}"
    if a.advantage == "online_dpo":
        for field, value, want in _of_pairs(config):
            if value != want:
                yield field, value, f"online_dpo is defined with {want} only"
    compares = a.advantage in _COMPARES_SIBLINGS or config.rollout.drop_zero_variance
    if config.rollout.group_size == 1 and compares:
        yield (
            "rollout.group_size",
            "a group of one has no siblings to compare with; use at least 2, or an advantage "
            "without a group baseline (reward, reinforce_pp) and no rollout.drop_zero_variance",
        )


def _of_pairs(config: Config) -> tuple[tuple[str, object, object], ...]:
    """Online DPO equals the gradient of its loss only as a plain sum, at the scored weights."""
    a = config.algorithm
    return (
        ("algorithm.objective", a.objective, "reinforce"),
        ("algorithm.aggregation", a.aggregation, "seq_mean_token_sum"),
        ("algorithm.mask_truncated", a.mask_truncated, False),
        ("trainer.minibatches", config.trainer.minibatches, 1),
    )


def _measure(a: AlgorithmConfig) -> Rows:
    """Refuse weights by proximal / engine with a ratio against the engine: a double count."""
    weighing = [name for name in a.corrections if CORRECTIONS[name].reweighs]
    if len(weighing) > 1:
        allowed = f"{' and '.join(weighing)} each multiply by proximal / engine; keep one"
        yield "algorithm.corrections", allowed
    objective = entry("algorithm.objective", a.objective, OBJECTIVES)
    if weighing and objective.reweighs and a.ratio == "engine":
        yield (
            "algorithm.corrections",
            f"{weighing[0]} weighs by proximal / engine, which the ratio of {a.objective} against "
            "the engine already contains; use algorithm.ratio=proximal",
        )


def _centering(config: Config) -> Rows:
    """Refuse objectives of which no exact sum shows the term, and runs without the masks."""
    a = config.algorithm
    if not a.centering:
        return
    rule = RatioRule.of(a)
    moves = config.trainer.minibatches > 1 and not _reads_current(a)
    if rule is None or moves or a.distill_coef:
        yield (
            "algorithm.centering",
            "its term is known for objective reinforce, cispo, ppo_clip and ppo_dual_clip with "
            "ratio=engine and corrections of age (lag, lag_decay) alone, and, where "
            "trainer.minibatches=1, for ratio=proximal with at most one of tis_token and icepop; "
            "not with distill_coef",
        )
    elif rule.kind == "plain":
        yield "algorithm.centering", "the term of a ratio without bounds is 0: leave it off"
    if _truncates(config) and not config.replay.sampling_mask:
        allowed = "where sampling truncates, replay.sampling_mask=true is needed"
        yield "algorithm.centering", allowed


def _reads_current(a: AlgorithmConfig) -> bool:
    """Whether the weight of a token is of theta / engine itself, also in later minibatches."""
    weighs = any(CORRECTIONS[name].reweighs for name in a.corrections)
    return not weighs and (a.ratio == "engine" or a.objective == "reinforce")


def exact_distillation(a: AlgorithmConfig) -> bool:
    """Whether the loss has the KL to the teacher over a support, and no advantage of it."""
    return a.distill_coef > 0 and a.distill_over != "token"


def _teachers(config: Config) -> Rows:
    a, seen = config.algorithm, set[str]()
    if a.distill_coef and not a.teachers:
        yield "algorithm.teachers", "distill_coef needs at least one"
    labels = [entry.label for entry in entries_of(config)]
    for teacher in teachers_of(a):
        name, field = teacher.name, ref_field(teacher.name)
        if name in seen or not _NAME.fullmatch(name) or name in _ROLES:
            allowed = f"a name of its own: letters, digits, _ and -, not {' or '.join(_ROLES)}"
            yield "algorithm.teachers.name", name, allowed
        seen.add(name)
        if bool(teacher.path) == bool(teacher.follows):
            yield field, (teacher.path, teacher.follows), "give either path or follows: policy"
        versions = (teacher.lag, teacher.every, teacher.ema)
        is_plain = versions == (0, 1, 0.0)
        if teacher.path and not is_plain:
            allowed = "a folder has one version; leave lag, every and ema out, or use follows"
            yield field, versions, allowed
        if teacher.follows and is_plain:
            allowed = "it would be the policy itself: use a lag, every above 1, or ema"
            yield field, versions, allowed
        if unknown := [label for label in teacher.tasks if label not in labels]:
            known = ", ".join(filter(None, labels)) or "none: the run has one task without a label"
            yield f"{field}.tasks", unknown, f"the labels are {known}"


def weight_for(teacher: TeacherConfig, task: str) -> float:
    """Weight of a teacher's term for tokens of a task, by its label."""
    return teacher.weight if not teacher.tasks or task in teacher.tasks else 0.0


def _distillation(config: Config) -> Rows:
    a = config.algorithm
    if not exact_distillation(a):
        return
    for entry in entries_of(config):
        every = [t.name for t in a.teachers if weight_for(t, entry.label)]
        if len(every) > 1:
            yield (
                "algorithm.teachers",
                every,
                f"distill_over={a.distill_over} takes one teacher for each task: give each its "
                "tasks, or use distill_over=token",
            )
    if config.ref_models.placement != "trainer":
        yield (
            "algorithm.distill_over",
            "separate ranks send one number per token: use token, or ref_models.placement=trainer",
        )
    masked = config.replay.sampling_mask and _truncates(config)
    if masked != (a.distill_over == "support"):
        yield (
            "algorithm.distill_over",
            "use support where sampling truncates and replay.sampling_mask=true, teacher_top_k "
            "where the trainer scores over the whole vocabulary",
        )


def _role_rows(config: Config) -> Rows:
    """Refuse settings that compare or carry one number per episode."""
    advantage, rollout = config.algorithm.advantage, config.rollout
    for task in entries_of(config):
        if not task.roles:
            continue
        if advantage in ("gae", "online_dpo") or "steps" in ADVANTAGES[advantage].needs:
            allowed = "task.roles needs an advantage of one number per role, such as grpo_mean"
            yield "algorithm.advantage", allowed
        for name, wanted in (("late_siblings", "drop"), ("stale_siblings", "group")):
            if getattr(rollout, name) != wanted:
                allowed = f"task.roles needs {wanted}: a sibling elsewhere is known by one reward"
                yield f"rollout.{name}", allowed
        for name, role in task.roles.items():
            if role.baseline != "role" and advantage not in _COMPARES_SIBLINGS:
                above = f"tasks.{task.label}" if task.label else "task"
                field, allowed = f"{above}.roles.{name}", f"{advantage} compares no siblings"
                yield f"{field}.baseline", role.baseline, allowed


def _forks(config: Config) -> Rows:
    """Forks and the advantage over their trees need each other, and single answers."""
    a, forks = config.algorithm, config.rollout.forks
    if bool(forks.pivots) != ("forks" in needed(a)):
        allowed = "algorithm.advantage=vine and rollout.forks.pivots above 0 need each other"
        yield "rollout.forks.pivots", allowed
    if not forks.pivots:
        return
    if not (forks.every or forks.separator):
        yield "rollout.forks.separator", "a text that ends a step is needed"
    for name, value in (
        ("algorithm.overlong_buffer", a.overlong_buffer),
        ("algorithm.mask_truncated", a.mask_truncated),
        ("rollout.oversample", config.rollout.oversample - 1),
    ):
        if value:
            yield name, value, "it reads whole answers; it is not for rollout.forks"
    for task in entries_of(config):
        with naming(task):
            refuse({"task": task}, _of_forked(task))


def _of_forked(task: TaskEntry) -> Rows:
    if task.kind is not TaskKind.SINGLE_ANSWER:
        yield "task.environment", "rollout.forks continues single answers"
    for term in task.terms:
        if term.unit in ("step", "turn"):
            allowed = "with rollout.forks a term scores whole answers: episode or group"
            yield "task.rewards", term.unit, allowed


def _truncates(config: Config) -> bool:
    samplings = (one for entry in entries_of(config) for one in entry.samplings.values())
    return any(sampling.truncates for sampling in samplings)
