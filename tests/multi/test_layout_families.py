"""Hugging Face logits against Megatron logits, and live modules against the tables, per family.

Tiny random models in fp32.  Logits see what tables that agree with each other cannot: a swapped k
and v, a norm in the wrong place, a router that normalises otherwise; two ranks see wrong cuts.  The
negative controls break a table on purpose and must be seen.  transformers and the CPU-patched
megatron-core need processes of their own; each serves all families, because starting costs more
than running.  Workers are this file run as a program.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moerl.config.schema import ParallelConfig
from moerl.layout import model_spec
from tests.helpers.layout_families import (
    FAMILIES,
    MESHES,
    NUM_TOKENS,
    SPECS,
    refusal,
    run,
    tokens,
    write,
)
from tests.helpers.nested_model import nest
from tests.helpers.patience import patience

TOLERANCE = 1e-5
# transformers in float32 is up to 1.3e-5 from itself in float64 there, elsewhere up to 2e-6
TOLERANCES = {"qwen3_next": 3e-5}
Gaps = Callable[[str], dict[str, float | str]]

LATENT = tuple(family for family, spec in SPECS.items() if spec.kv_lora)
DENSE = tuple(family for family, spec in SPECS.items() if not spec.experts)
PREDICTING = tuple(
    family
    for family, config in FAMILIES.items()
    if model_spec(config | {"num_nextn_predict_layers": 1}).mtp_layers
)


CUT = tuple(family for family in FAMILIES if not refusal(family, MESHES["tp2-etp2"]))
# mutation -> (mesh on which it is visible, families it applies to)
MUTATIONS = {
    "kv_swap": ("tp1", [f for f in FAMILIES if f not in LATENT]),
    "gate_up_swap": ("tp1", list(FAMILIES)),
    "experts_off_by_one": ("tp1", [f for f in FAMILIES if f not in DENSE]),
    "missing_rule": ("tp1", list(FAMILIES)),
    "misspelt_hf": ("tp1", list(FAMILIES)),
    "misspelt_local": ("tp1", list(FAMILIES)),
    "wrong_cut": ("tp2-etp2", list(CUT)),
    "wrong_attention_cut": ("tp2-etp2", [f for f in CUT if f not in LATENT]),
    "wrong_latent_cut": ("tp2-etp2", list(LATENT)),
}


FEW = ("qwen3_moe", "deepseek_v3", "gpt_oss")  # of the default selection


# --- workers -------------------------------------------------------------------------------------
def write_models(folder: Path, families: Collection[str]) -> None:
    """A model folder per family, written by transformers, and the logits of a fixed batch."""
    from moerl.engine import torchvision_fix

    torchvision_fix.arm()
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    for family in families:
        config = FAMILIES[family]
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config),
            attn_implementation="eager",
            experts_implementation="eager",
        )
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if "norm" in name:
                    around_one = not SPECS[family].zero_centred_norm or "linear_attn" in name
                    tensor.copy_(int(around_one) + 0.2 * torch.randn_like(tensor))
                elif "inv_freq" not in name:
                    tensor.normal_(0, 0.15)
        model.eval().save_pretrained(folder / family)
        nest(folder / family, config)
        with torch.no_grad():
            logits = model(tokens(config["vocab_size"])).logits
        save_file({"logits": logits.contiguous()}, folder / f"{family}.logits")
    for family in PREDICTING:
        if family in families:
            add_prediction_layer(folder, family)


def add_prediction_layer(folder: Path, family: str) -> None:
    """The same model with a random prediction layer, which transformers does not write."""
    import torch
    from safetensors.torch import load_file, save_file

    from moerl.layout import hf_shapes, mtp_copies

    source, target = folder / family, folder / f"{family}+mtp"
    config = json.loads((source / "config.json").read_text())
    spec = model_spec(config | {"num_nextn_predict_layers": 1, "num_mtp_layers": 1})
    tensors = load_file(source / "model.safetensors")
    prefix = f"model.layers.{spec.layers}."
    for name, shape in hf_shapes(spec).items():
        if name.startswith(prefix):
            tensors[name] = torch.randn(shape)
    copies = {copy: tensors[of].clone() for copy, of in mtp_copies(spec).items()}
    target.mkdir()
    save_file(tensors | copies, target / "model.safetensors")
    config |= {"num_nextn_predict_layers": 1}
    (target / "config.json").write_text(json.dumps(config))
    (folder / f"{target.name}.logits").write_bytes((folder / f"{family}.logits").read_bytes())


def compare_models(folder: Path, mesh: str, families: Collection[str]) -> dict[str, float | str]:
    """`family mesh mutation` -> largest difference of Megatron's logits, or the refusal.

    On one rank also `family saved` -> tensors that a save changes.
    """
    from moerl.trainer.model import platform

    place = platform.prepare("cpu")
    from moerl.core.errors import MoerlError
    from moerl.trainer.model import parallel

    ranks = parallel.start(ParallelConfig(**MESHES[mesh]), place, timeout_s=patience(60))
    cases = [(family, "none") for family in FAMILIES]
    cases += [(f"{family}+mtp", "none") for family in PREDICTING]
    cases += [(f, name) for name, (on, fs) in MUTATIONS.items() if on == mesh for f in fs]
    cases = [(family, name) for family, name in cases if family.removesuffix("+mtp") in families]
    found: dict[str, float | str] = {}
    for family, mutation in cases:
        key = f"{family} {mesh} {mutation}"
        try:
            with broken_table(FAMILIES[family.removesuffix("+mtp")]["model_type"], mutation):
                found[key] = logit_gap(folder, family, ranks)
        except MoerlError as error:
            found[key] = str(error)
    if ranks.world_size == 1:
        for family in [family for family, mutation in cases if mutation == "none"]:
            found[f"{family} saved"] = save_again(folder, family, ranks)
    return found


def save_again(folder: Path, family: str, ranks: Any) -> str:
    """Loads live modules and saves them; names a tensor of the new folder that differs."""
    import torch

    from moerl.config.schema import TrainerConfig
    from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf
    from moerl.trainer.hf_io.hf_shards import HfShards, RankGroup, every_rank
    from moerl.trainer.model.gpt import build, live_tensors

    source, target = HfFolder(folder / family), folder / f"{family}.again"
    model = build(source.spec, TrainerConfig(parallel=ranks.sizes), ranks, with_replay=False)
    live = live_tensors(model.gpt)
    load_hf(live, model.tiles, source)
    tiles = every_rank(model.spec, ranks.sizes, "local")
    HfShards(lambda: live, tiles, RankGroup(0, None), source.path).save(target)
    again = HfFolder(target)
    differ = [n for n in source.names if not torch.equal(again.read(n), source.read(n))]
    return ", ".join(differ[:3])


def logit_gap(folder: Path, family: str, ranks: Any) -> float:
    import torch
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from safetensors.torch import load_file

    from moerl.config.schema import TrainerConfig
    from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf
    from moerl.trainer.model.gpt import build, live_tensors

    source = HfFolder(folder / family)
    model = build(source.spec, TrainerConfig(parallel=ranks.sizes), ranks, with_replay=False)
    load_hf(live_tensors(model.gpt), model.tiles, source)
    ids = tokens(source.spec.vocab_size)
    with torch.no_grad():
        part = model.module(ids, torch.arange(NUM_TOKENS).expand_as(ids), None)
        logits = gather_from_tensor_model_parallel_region(part)[..., : source.spec.vocab_size]
    want = load_file(folder / f"{family}.logits")["logits"]
    return float((logits - want).abs().max())


@contextmanager
def broken_table(model_type: str, mutation: str) -> Iterator[None]:
    """The family's Megatron rules, wrong in one way."""
    from moerl.layout import rules, shards

    def swap(rule: Any, ends: str, *order: int) -> Any:
        if not rule.local.endswith(ends) or len(rule.hf) != len(order):
            return rule
        return replace(rule, hf=tuple(rule.hf[i] for i in order))

    def change(rule: Any) -> Any:
        name, fc1 = rule.local, "linear_fc1.weight" in rule.local
        match mutation:
            case "kv_swap":
                return swap(rule, "linear_qkv.weight", 0, 2, 1)
            case "gate_up_swap" if rule.fuse is rules.deinterleave:
                return replace(rule, fuse=rules.copy)
            case "gate_up_swap":
                return swap(rule, "linear_fc1.weight", 1, 0)
            case "missing_rule" if name.endswith("input_layernorm.weight"):
                return None
            case "misspelt_hf" if name.endswith("input_layernorm.weight"):
                return replace(rule, hf=("input_layernrom.weight",))
            case "misspelt_local" if name.endswith("input_layernorm.weight"):
                return replace(rule, local="input_layernrom.weight")
            case "wrong_cut" if fc1:
                return replace(rule, cut=rules.flat)
            case "wrong_attention_cut" if name.endswith("linear_qkv.weight"):
                return replace(rule, cut=rules.each)
            case "wrong_latent_cut" if name.endswith("kv_layernorm.weight"):
                return rule
            case "wrong_latent_cut" if name.endswith("linear_kv_up_proj.weight"):
                return replace(rule, cut=cut_by_turns)
        return rule

    def parts(group: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            replace(part, megatron=tuple(filter(None, map(change, part.megatron))))
            for part in group
        )

    family, expand = shards.FAMILY_TABLES[model_type], shards.expand
    kinds = ("every", "moe", "dense", "linear")
    changed = {kind: parts(getattr(family, kind)) for kind in kinds}
    shards.FAMILY_TABLES[model_type] = replace(family, **changed)
    if mutation == "experts_off_by_one":
        shards.expand = lambda spec, *rest: shift_experts(spec, expand(spec, *rest))
    try:
        yield
    finally:
        shards.FAMILY_TABLES[model_type], shards.expand = family, expand


def cut_by_turns(blocks: Any, shard: Any) -> Any:
    """Every size-th row: the right shape, the wrong rows."""
    return [b._replace(rows=b.rows[shard.rank :: shard.size]) for b in blocks]


def shift_experts(spec: Any, named: Any) -> Any:
    """Every slot holds the next expert: still a permutation, so it round-trips."""

    def move(name: str) -> str:
        head, found, tail = name.partition(".experts.")
        if not found:
            return name
        expert, _, rest = tail.partition(".")
        return f"{head}.experts.{(int(expert) + 1) % spec.experts}.{rest}"

    return {
        name: replace(local, tiles=tuple(t._replace(hf=move(t.hf)) for t in local.tiles))
        for name, local in named.items()
    }


def check_live(meshes: list[dict[str, int]]) -> int:
    """Builds GPTModel as each rank of each mesh; the fake group moves nothing and never waits.

    Returns how many (model, rank) were compared with the tables.
    """
    from moerl.trainer.model import platform

    place = platform.prepare("cpu")
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from moerl.core.errors import ConfigError
    from moerl.layout import check_covers, megatron_tiles

    num = 0
    for axes in meshes:
        layout = ParallelConfig(**axes, vocab_divisible_by=8)
        for rank in range(layout.world_size):
            dist.init_process_group(
                "fake", store=FakeStore(), rank=rank, world_size=layout.world_size
            )
            parallel_state.initialize_model_parallel(
                layout.tp,
                layout.pp,
                layout.vpp if layout.vpp > 1 else None,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
                create_gloo_process_groups=False,
            )
            tensor_parallel.model_parallel_cuda_manual_seed(1)
            for family, config in live_cases(layout.tp):
                spec = model_spec(config)
                try:
                    tiles = megatron_tiles(spec, layout, rank)
                except ConfigError:
                    continue  # counted by the test
                try:
                    check_covers(tiles, live_shapes(spec, layout, place))
                except Exception as error:
                    raise AssertionError(f"{family} {axes} rank {rank}: {error}") from error
                num += 1
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    return num


def live_cases(tp: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every family, and those that predict further tokens once more with two such layers."""
    for family, config in FAMILIES.items():
        if tp > 1 and SPECS[family].qk_norm_all_heads:
            continue
        yield family, config
        if family in PREDICTING:
            yield family, config | {"num_nextn_predict_layers": 2}


def live_shapes(spec: Any, layout: Any, place: Any) -> dict[str, tuple[int, ...]]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from moerl.config.schema import TrainerConfig
    from moerl.trainer.model.gpt import decoder_spec, gpt_model, live_tensors
    from moerl.trainer.model.transformer import transformer_config

    config = transformer_config(spec, TrainerConfig(parallel=layout), place, with_replay=False)
    if layout.vpp > 1:
        config.virtual_pipeline_model_parallel_size = layout.vpp
    config.mtp_num_layers = spec.mtp_layers or None
    shapes = {}
    for chunk in range(layout.vpp):
        stage = chunk if layout.vpp > 1 else None
        where = {"ignore_virtual": False, "vp_stage": stage}
        mtp = None
        if spec.mtp_layers:
            block = decoder_spec(spec, config, use_te=False, vp_stage=stage)
            mtp = get_gpt_mtp_block_spec(
                config, block, use_transformer_engine=False, vp_stage=stage
            )
        gpt = gpt_model(
            spec,
            config,
            use_te=False,
            sizes=layout,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            mtp_block_spec=mtp,
            vp_stage=stage,
        )
        prefix = f"chunk{chunk}." if layout.vpp > 1 else ""
        shapes |= {prefix + name: tuple(t.shape) for name, t in live_tensors(gpt).items()}
    return shapes


# --- tests ---------------------------------------------------------------------------------------


COMPARED = [
    name if name.removesuffix("+mtp") in FEW else pytest.param(name, marks=pytest.mark.full)
    for name in (*FAMILIES, *(f"{family}+mtp" for family in PREDICTING))
]


@pytest.fixture(scope="module")
def gaps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Gaps:
    """mesh -> what `compare_models` found on it; run once each, for the families of the tests."""
    chosen = (item for item in request.session.items if item.path == request.path)
    full = any(item.get_closest_marker("full") for item in chosen)
    names = ",".join(FAMILIES if full else FEW)
    folder = tmp_path_factory.mktemp("models")
    write(str(folder), names, program=__file__)

    @cache
    def output(mesh: str) -> tuple[str, str]:
        """(what the worker printed, why it failed); a failure is not repeated by every test."""
        try:
            return run(
                "compare",
                str(folder),
                mesh,
                names,
                world=MESHES[mesh].get("tp", 1),
                program=__file__,
            ), ""
        except (AssertionError, subprocess.TimeoutExpired) as error:
            return "", str(error)

    def of(mesh: str) -> dict[str, float | str]:
        printed, failure = output(mesh)
        assert not failure, failure
        return json.loads(printed)

    return of


@pytest.mark.parametrize(
    "mesh", ["tp1", "tp2-etp2", pytest.param("tp2-ep2", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("family", COMPARED)
def test_logits_agree_with_transformers(gaps: Gaps, family: str, mesh: str) -> None:
    gap = gaps(mesh)[f"{family} {mesh} none"]
    if why := refusal(family, MESHES[mesh]):
        assert isinstance(gap, str), f"{family} was built on {mesh}"
        assert why in gap
    else:
        assert isinstance(gap, float), gap
        assert gap <= TOLERANCES.get(family, TOLERANCE), (
            f"{family} on {mesh}: logits differ by {gap:.2e}"
        )


@pytest.mark.parametrize("family", COMPARED)
def test_live_modules_are_saved_bitwise(gaps: Gaps, family: str) -> None:
    """The written folder holds every tensor of the source, prediction layers too."""
    assert gaps("tp1")[f"{family} saved"] == ""


@pytest.mark.parametrize(
    "wanted", [FEW, pytest.param(tuple(FAMILIES), marks=pytest.mark.full)], ids=["few", "all"]
)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_table_is_seen(gaps: Gaps, mutation: str, wanted: tuple[str, ...]) -> None:
    """By the logits, or by a refusal that names the tensor."""
    mesh, families = MUTATIONS[mutation]
    families = [family for family in families if family in wanted]
    assert families
    refused = mutation in ("missing_rule", "misspelt_hf", "misspelt_local")
    for family in families:
        gap = gaps(mesh)[f"{family} {mesh} {mutation}"]
        if refused:
            assert isinstance(gap, str), f"{family}: {mutation} was not refused"
            assert "input_layern" in gap
        else:
            assert isinstance(gap, float), f"{family}: {gap}"
            assert gap > 100 * TOLERANCE, f"{family}: {mutation} changes logits by {gap:.1e}"


LIVE: list[dict[str, int]] = [{}, {"tp": 2, "pp": 2, "vpp": 2, "ep": 2}]
MORE_LIVE = [{"tp": 4, "etp": 2}, {"pp": 2, "ep": 4, "dp": 4}, {"tp": 2, "pp": 2}]


def num_live(axes: dict[str, int]) -> int:
    """How many (model, rank) a mesh has; models with prediction layers count twice."""
    families = [family for family in FAMILIES if not refusal(family, axes)]
    again = [family for family in families if family in PREDICTING]
    return ParallelConfig(**axes).world_size * len(families + again)


@pytest.mark.full
@pytest.mark.parametrize("meshes", [LIVE, MORE_LIVE], ids=["few", "more"])
def test_live_modules_are_tiled_exactly(meshes: list[dict[str, int]]) -> None:
    """Names, shapes, layer homes, buffers, prediction layers, on every rank of every mesh."""
    want = sum(num_live(axes) for axes in meshes)
    assert run("live", json.dumps(meshes), program=__file__) == str(want)


if __name__ == "__main__":
    task, *arguments = sys.argv[1:]
    if task == "write":
        write_models(Path(arguments[0]), arguments[1].split(","))
    elif task == "live":
        print(check_live(json.loads(arguments[0])))
    else:
        print(json.dumps(compare_models(Path(arguments[0]), arguments[1], arguments[2].split(","))))
