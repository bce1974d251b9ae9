"""The engine's layout against SGLang's own `load_weights`, tensor by tensor, bit by bit.

`tests/helpers/sglang_oracle.py` runs SGLang once, in one process, for the models and layouts of the
tests that run: a few in the default selection, all in the full suite.  Every test then compares
what `sglang_tiles` says with what it wrote.  Nothing of the layout is used to make the expectation,
so a table that is wrong in a self-consistent way (a k/v swap) is seen here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moerl.config.schema import ParallelConfig
from moerl.core.errors import ConfigError, LayoutError
from moerl.engine.weight_layout import LiveWeightLayout, check_model, engine_layout
from moerl.layout import (
    FAMILIES,
    SGLANG_SHARES_HEAD,
    Named,
    at,
    check_covers,
    each,
    flat,
    megatron_tiles,
    model_spec,
    sglang_tiles,
    shards,
)
from moerl.layout.rules import Part, Rule
from moerl.weight_sync import held_shards as plan_layout
from moerl.weight_sync.buckets import Piece, WirePolicy
from moerl.weight_sync.transfer_plan import TransferPlan
from moerl.weight_sync.wire_formats import FP8_BLOCKS, engine_wants
from tests.helpers.patience import patience
from tests.helpers.sglang_oracle import CASES, FP8_CASES, REFUSED_CASES, VARIANTS, Case

Tensors = dict[str, torch.Tensor]
ALL = pytest.mark.full  # needs every model and layout
FEW = (
    Case("qwen3_moe", 1),
    Case("qwen3_moe", 2),
    Case("qwen3_moe", 4, ep=2),
    Case("glm4_moe", 1),
    FP8_CASES[0],
)
ROOT = Path(__file__).resolve().parents[2]


def rare(*cases: Case) -> list[object]:
    """Parameters: cases that are not among the few run in the full suite."""
    return [case if case in FEW else pytest.param(case, marks=ALL) for case in cases]


@pytest.fixture(scope="module")
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    chosen = (item for item in request.session.items if item.path == request.path)
    names = [] if any(item.get_closest_marker("full") for item in chosen) else map(str, FEW)
    folder = tmp_path_factory.mktemp("sglang")
    packages = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/helpers/sglang_oracle.py"), str(folder), *names],
        env=os.environ | {"PYTHONPATH": packages, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=patience(200),
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return folder


def loaded(oracle: Path, name: str, rank: int = 0) -> Tensors:
    """What SGLang wrote for a case, runner or variant.  Raises AssertionError where it failed."""
    failed = json.loads((oracle / "failed.json").read_text())
    assert name not in failed, f"SGLang did not load {name}: {failed[name]}"
    return load_file(oracle / "loaded" / f"{name}.{rank}.safetensors")


def config_of(folder: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((folder / "config.json").read_text())
    return config


def checkpoint(folder: Path) -> Tensors:
    """The file's tensors, one expert per tensor and rows first, as the layout counts them.

    gpt-oss files stack experts: weights as [E, in, out], biases as [E, out].  Of a quantised
    checkpoint: what it was made from, which is what a trainer holds.
    """
    tensors: Tensors = {}
    plain = folder.with_name(f"{folder.name}.plain")
    held = plain if plain.exists() else folder
    for name, tensor in load_file(held / "model.safetensors").items():
        prefix, experts, kind = name.partition(".experts.")
        if not experts or kind[0].isdigit():
            tensors[name] = tensor
            continue
        if ".feed_forward" in prefix:  # Llama-4 stacks [E, in, gate and up], [E, in, out]
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for expert, value in enumerate(tensor):
                for part, rows in zip(names, value.T.chunk(len(names)), strict=True):
                    tensors[f"{prefix}.experts.{expert}.{part}.weight"] = rows
            continue
        for expert, value in enumerate(tensor):
            tensors[f"{prefix}.experts.{expert}.{kind}"] = value.T if value.dim() == 2 else value
    return tensors


def by_tiles(named: Named, hf: Tensors, dtype: torch.dtype) -> Tensors:
    """Content of a rank by its tiles; what neither a tile nor padding writes stays NaN."""
    out: Tensors = {}
    for name, local in named.items():
        kept = getattr(torch, local.dtype) if local.dtype else dtype
        tensor = torch.full(local.shape, float("nan"), dtype=kept)
        for tile in local.tiles:
            tensor[at(tile.box)] = hf[tile.hf][at(tile.hf_box)].to(kept)
        if local.pad_rows:
            tensor[-local.pad_rows :] = 0
        out[name] = tensor
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check(oracle: Path, case: Case, runner: str = "") -> None:
    """Every parameter of every rank.  Raises LayoutError, or AssertionError naming tensors.

    runner: whose parameters to compare with, in place of the case's own.
    """
    everything = [loaded(oracle, runner or str(case), rank) for rank in range(case.tp)]
    folder = oracle / case.model
    spec, hf = model_spec(config_of(folder)), checkpoint(folder)
    for rank, live in enumerate(everything):
        named = sglang_tiles(spec, case.tp, rank, case.ep, case.dp)
        check_covers(named, {name: tuple(value.shape) for name, value in live.items()})
        want = by_tiles(named, hf, getattr(torch, case.dtype))
        wrong = [name for name in live if not same_bits(want[name], live[name])]
        assert not wrong, f"{case} rank {rank}: {', '.join(wrong)} not as SGLang loads them"


@pytest.mark.parametrize("case", rare(*CASES), ids=str)
def test_tiles_are_what_sglang_loads(oracle: Path, case: Case) -> None:
    check(oracle, case)


def as_sent(value: torch.Tensor, piece: Piece, harm: str) -> torch.Tensor:
    if piece.is_scale or piece.dtype == "float8_e4m3fn":
        made = FP8_BLOCKS.pack(value)[piece.is_scale]
        return made.roll(1, -1) if piece.is_scale and harm == "roll" else made
    return value.to(getattr(torch, piece.dtype))


def planned(oracle: Path, case: Case, *, harm: str = "") -> None:
    """Trainer ranks, whose content their tiles define, send bytes; engine ranks place them.

    Compared with what SGLang's loader wrote, bit by bit.  Raises AssertionError naming a tensor.
    """
    everything = [loaded(oracle, str(case), rank) for rank in range(case.tp)]
    folder = oracle / case.model
    spec, hf = model_spec(config_of(folder)), checkpoint(folder)
    tp = 1 if spec.kv_heads % 2 else 2
    trainer = ParallelConfig(tp=tp, pp=2, ep=2 if spec.experts else 1)
    engine = plan_layout.EngineLayout(case.tp, case.ep, case.dp)
    wants = engine_wants(None, config_of(folder))
    plan = TransferPlan(spec, trainer, engine, 1, WirePolicy(case.dtype, wants, bucket_bytes=1024))
    wire: dict[tuple[int, int], torch.Tensor] = {}
    for rank in range(trainer.world_size):
        held = by_tiles(megatron_tiles(spec, trainer, rank), hf, torch.bfloat16)
        for region in plan.sender(rank).regions:
            parts = [as_sent(held[p.src_name][at(p.src_box)], p, harm) for p in region.pieces]
            flat = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
            wire[region.src, region.dst] = torch.cat(flat)
    for rank, live in enumerate(everything):
        got = {name: torch.full_like(value, float("nan")) for name, value in live.items()}
        receiver = plan.receiver(rank)
        for region in receiver.regions:
            data = wire[region.src, rank]
            assert len(data) == region.num_bytes
            for p in region.pieces[1:] if harm == "drop" else region.pieces:
                part = data[p.offset : p.offset + p.num_bytes].view(getattr(torch, p.dtype))
                into = got[p.dst_name][at(p.dst_box)]
                into.copy_(part.view(into.shape))
        for name, first in receiver.padding:
            got[name][first:] = 0  # nobody sends padding
        wrong = [name for name, value in live.items() if not same_bits(got[name], value)]
        assert not wrong, f"{case} rank {rank}: {', '.join(wrong)} not as SGLang loads them"


@pytest.mark.parametrize("case", rare(*CASES, *FP8_CASES), ids=str)
def test_the_transfer_plan_writes_what_sglang_loads(oracle: Path, case: Case) -> None:
    planned(oracle, case)


def test_the_transfer_plan_is_compared_in_twelve_cases_of_every_kind() -> None:
    named = {(case.model, case.tp) for case in CASES}
    assert len(named) >= 12
    assert {"qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss"} <= {model for model, _ in named}


def test_a_scale_of_another_block_is_seen(oracle: Path) -> None:
    with pytest.raises(AssertionError, match=r"weight_scale_inv.* not as SGLang loads them"):
        planned(oracle, FP8_CASES[0], harm="roll")


def test_a_dropped_piece_is_seen(oracle: Path) -> None:
    with pytest.raises(AssertionError, match="not as SGLang loads them"):
        planned(oracle, Case("qwen3_moe", 2), harm="drop")


def test_every_family_is_compared_at_three_sizes() -> None:
    plain = {(case.model, case.tp) for case in CASES if case.ep == case.dp == 1}
    assert {(family, tp) for family in FAMILIES for tp in (1, 2, 4)} <= plain


@ALL
def test_what_sglang_does_not_load_here(oracle: Path) -> None:
    """Not our refusals but SGLang's own, so that a release that lifts one is noticed."""
    refused = json.loads((oracle / "refused.json").read_text())
    assert refused.keys() == REFUSED_CASES.keys()
    starts = {
        # its k norm is built with the query's size
        "olmoe_gqa": "AssertionError in default_weight_loader: Attempted to load weight "
        "(torch.Size([8])) into parameter (torch.Size([32]))",
        # the CPU has rotary embeddings of kind deepseek_yarn only
        "deepseek_v3_plain_rope": "AssertionError in get_rope_cpu: ",
        # the loader of stacked bf16 experts does not cut them over EP
        "gpt_oss_ep": "RuntimeError in _load_w2: The size of tensor a (2) must match",
        # needs attention sinks
        "gpt_oss_torch_native": "AssertionError in handle_model_specific_adjustments: "
        "GptOssForCausalLM requires one of ['triton'",
    }
    for name, start in starts.items():
        assert refused[name].startswith(start), f"{name}: {refused[name]}"
    assert starts.keys() == refused.keys()


# --- identity of the layout ----------------------------------------------------------------------
def layout_of(oracle: Path, report: str, model: str) -> LiveWeightLayout:
    args = json.loads((oracle / "reports.json").read_text())[report]["args"]
    return engine_layout(args, {}, config_of(oracle / model), release="0.5.23")


@ALL
def test_every_compared_layout_has_its_own_fingerprint(oracle: Path) -> None:
    reports = json.loads((oracle / "reports.json").read_text())
    prints = {}
    for case in (*CASES, *FP8_CASES):
        assert reports[str(case)]["refusal"] == ""
        if case.model == "olmoe" and case.tp > 1:  # it loads, and then normalises half the heads
            with pytest.raises(ConfigError, match=r"engine.tp = \d is not usable: .* olmoe"):
                layout_of(oracle, str(case), case.model)
            continue
        layout = layout_of(oracle, str(case), case.model)
        assert (layout.tp, layout.ep, layout.dp) == (case.tp, case.ep, case.dp)
        assert layout.quantization == ("fp8_block" if case in FP8_CASES else "none")
        key = (layout.family, case.tp, case.ep, case.dp, case.dtype, layout.quantization)
        assert prints.setdefault(key, layout.fingerprint()) == layout.fingerprint()
    assert len(set(prints.values())) == len(prints)


@ALL
@pytest.mark.parametrize(
    ("runner", "seen", "flag"),
    [
        ("flashinfer_cutlass", "w13_weight.* not as SGLang loads them", "use_flashinfer_cutlass"),
        ("triton_kernel", "w13_weight: live shape", "use_triton_kernels"),
    ],
)
def test_a_repacking_runner_differs_and_is_refused(
    oracle: Path, runner: str, seen: str, flag: str
) -> None:
    """By the oracle, by the server arguments and by the modules, each for itself."""
    with pytest.raises((AssertionError, LayoutError), match=seen):
        check(oracle, Case("qwen3_moe", 1), runner)
    with pytest.raises(ConfigError, match=f"moe_runner_backend = '{runner}'"):
        layout_of(oracle, runner, "qwen3_moe")
    reports = json.loads((oracle / "reports.json").read_text())
    assert f"{flag} of UnquantizedFusedMoEMethod keeps" in reports[runner]["refusal"]


# --- models that load without an error -----------------------------------------------------------
@ALL
@pytest.mark.parametrize("model", VARIANTS)
def test_a_variant_is_loaded_whole_or_refused(oracle: Path, model: str) -> None:
    """Tied heads and dense layers: refused exactly where SGLang leaves parameters unfilled."""
    live = loaded(oracle, model)
    config = config_of(oracle / model)
    unfilled = [name for name, value in live.items() if value.isnan().any()]
    if unfilled:
        with pytest.raises(ConfigError, match=r"unfilled") as refusal:
            check_model(config)
        tied = refusal.value.field == "tie_word_embeddings"
        assert unfilled == ["lm_head.weight"] if tied else all(".mlp." in n for n in unfilled)
        return
    check_model(config)
    named = sglang_tiles(model_spec(config), 1, 0)
    check_covers(named, {name: tuple(value.shape) for name, value in live.items()})
    want = by_tiles(named, checkpoint(oracle / model), torch.bfloat16)
    assert [name for name in live if not same_bits(want[name], live[name])] == []


@ALL
def test_variants_of_both_kinds_exist(oracle: Path) -> None:
    heads = {name: config_of(oracle / name)["model_type"] for name in VARIANTS if ".tied" in name}
    shared = {family for family in heads.values() if family in SGLANG_SHARES_HEAD}
    assert shared == set(SGLANG_SHARES_HEAD)
    assert set(heads.values()) == set(FAMILIES)


# --- negative controls ---------------------------------------------------------------------------
def break_rule(
    monkeypatch: pytest.MonkeyPatch, family: str, local: str, change: Rule | None
) -> None:
    """Replace (or, with None, remove) the SGLang rule of one tensor."""
    table = shards.FAMILY_TABLES[family]

    def broken(part: Part) -> Part:
        rules = tuple(change if rule.local.endswith(local) else rule for rule in part.sglang)
        return replace(part, sglang=tuple(rule for rule in rules if rule is not None))

    kinds = {kind: tuple(map(broken, getattr(table, kind))) for kind in ("every", "moe", "dense")}
    changed = replace(table, **kinds)
    assert changed != table
    monkeypatch.setitem(shards.FAMILY_TABLES, family, changed)


def rule_of(family: str, local: str) -> Rule:
    table = shards.FAMILY_TABLES[family]
    parts = (*table.every, *table.moe, *table.dense)
    return next(r for part in parts for r in part.sglang if r.local.endswith(local))


@ALL
def test_heads_in_the_order_of_the_file_are_seen(
    oracle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama-4: SGLang rotates the halves of a head where the file has pairs of neighbours."""
    rule = rule_of("llama4", "qkv_proj.weight")
    break_rule(monkeypatch, "llama4", "qkv_proj.weight", replace(rule, cut=each))
    with pytest.raises(AssertionError, match=r"rank 0: .*qkv_proj.* not as SGLang loads them"):
        check(oracle, Case("llama4", 2))


MUTATIONS = {
    "k and v swapped": ("qkv_proj.weight", lambda r: replace(r, hf=(r.hf[0], r.hf[2], r.hf[1]))),
    "gate and up swapped": ("w13_weight", lambda r: replace(r, hf=r.hf[::-1])),
    "a flat slice of gate and up": ("w13_weight", lambda r: replace(r, cut=flat)),
    "a flat slice of q, k, v": ("qkv_proj.weight", lambda r: replace(r, cut=flat)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_rule_of_the_right_shape_is_seen(
    oracle: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    local, change = MUTATIONS[name]
    break_rule(monkeypatch, "qwen3_moe", local, change(rule_of("qwen3_moe", local)))
    with pytest.raises(AssertionError, match=rf"rank 0: .*{local}.* not as SGLang loads them"):
        check(oracle, Case("qwen3_moe", 2))


def test_rows_instead_of_columns_are_seen(oracle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = rule_of("qwen3_moe", "w2_weight")
    break_rule(monkeypatch, "qwen3_moe", rule.local, replace(rule, cut=each))
    with pytest.raises(LayoutError, match=r"w2_weight: live shape"):
        check(oracle, Case("qwen3_moe", 2))


def test_a_missing_rule_is_named(oracle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(monkeypatch, "qwen3_moe", "q_norm.weight", None)
    with pytest.raises(LayoutError, match=r"self_attn.q_norm.weight: no layout rule"):
        check(oracle, Case("qwen3_moe", 1))


def test_a_misspelt_name_is_named(oracle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = rule_of("qwen3_moe", "gate.weight")
    break_rule(monkeypatch, "qwen3_moe", "gate.weight", replace(rule, local="mlp.gaet.weight"))
    with pytest.raises(LayoutError, match=r"mlp.gate.weight: no layout rule"):
        check(oracle, Case("qwen3_moe", 1))


def test_a_wrong_dtype_is_seen(oracle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = rule_of("glm4_moe", "mlp.gate.weight")
    break_rule(monkeypatch, "glm4_moe", "mlp.gate.weight", replace(rule, dtype=""))
    with pytest.raises(AssertionError, match=r"mlp.gate.weight not as SGLang loads them"):
        check(oracle, Case("glm4_moe", 1))


@pytest.mark.parametrize("case", [Case("qwen3_moe", 2), Case("qwen3_moe", 4, ep=2)], ids=str)
def test_experts_off_by_one_are_seen(
    oracle: Path, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """A permutation of experts: every shape and every round trip stays right."""
    original = shards.expand

    def shifted(*args: object) -> Named:
        def move(name: str) -> str:
            head, experts, tail = name.partition(".experts.")
            if not experts:
                return name
            expert, rest = tail.split(".", 1)
            return f"{head}.experts.{(int(expert) + 1) % 4}.{rest}"

        return {
            name: replace(local, tiles=tuple(t._replace(hf=move(t.hf)) for t in local.tiles))
            for name, local in original(*args).items()
        }

    monkeypatch.setattr(shards, "expand", shifted)
    with pytest.raises(AssertionError, match=r"w13_weight, .*w2_weight.* not as SGLang loads them"):
        check(oracle, case)
