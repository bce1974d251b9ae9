"""Checkpoints of plain megatron-core read by the tools, and the tools' checkpoints read by it.

One folder is written as Megatron-LM writes them: a GPTModel of megatron-core with a config spelt
here, filled by a mapping that is written out here, saved by `dist_checkpointing.save`, over expert
ranks and over pipeline stages, with one tensor for all layers and with one for each.  The other
tests take every family both ways on one rank.  Workers are this file run as a program.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moerl.config.schema import ParallelConfig
from moerl.core.errors import ModelError
from moerl.layout import model_spec
from moerl.trainer.checkpoints.convert import convert_to_hf, convert_to_megatron
from moerl.trainer.checkpoints.convert_output import ConversionRanks
from moerl.trainer.checkpoints.megatron_folder import MegatronFolder
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf
from moerl.trainer.hf_io.hf_save import file_form, write_json
from tests.helpers.rank_server import run_ranks
from tests.helpers.trainer_support import EXPERTS, LAYERS, ROOT, TOP_K, VOCAB, make_model

CONFIGS = json.loads((ROOT / "tests/data/layout_families.json").read_text())
HEADS, GROUPS, HEAD = 4, 2, 16
ROWS = 128  # of the padded vocabulary


def _write_model(folder: Path, family: str) -> HfFolder:
    generator = torch.Generator().manual_seed(3)
    form = file_form(model_spec(CONFIGS[family]))
    tensors = {name: torch.randn(form[name].shape, generator=generator) for name in form}
    folder.mkdir()
    write_json(folder / "config.json", CONFIGS[family])
    save_file(tensors, folder / "model.safetensors")
    return HfFolder(folder)


def _to_hf(source: MegatronFolder, to: Path) -> dict[str, torch.Tensor]:
    convert_to_hf(source, to, ConversionRanks(), lambda *_: None)
    return load_file(to / "model.safetensors")


# --- plain megatron-core, as Megatron-LM uses it -------------------------------------------------
def _plain_params(tensors: dict[str, torch.Tensor], layer: int, experts: range) -> Any:
    """(name in a local layer, value) of a layer, by the shapes that megatron-core documents."""
    hf = f"model.layers.{layer}."
    qkv = []
    q, k, v = (tensors[f"{hf}self_attn.{x}_proj.weight"] for x in "qkv")
    per_group = HEADS // GROUPS * HEAD
    for group in range(GROUPS):
        qkv.append(q[group * per_group : (group + 1) * per_group])
        qkv += [x[group * HEAD : (group + 1) * HEAD] for x in (k, v)]
    yield "self_attention.linear_qkv.weight", torch.cat(qkv)
    for name, of in (
        ("input_layernorm.weight", "input_layernorm.weight"),
        ("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        ("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
        ("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
        ("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
        ("mlp.router.weight", "mlp.gate.weight"),
    ):
        yield name, tensors[hf + of]
    for local, expert in enumerate(experts):
        gate, up, down = (
            tensors[f"{hf}mlp.experts.{expert}.{x}_proj.weight"] for x in ("gate", "up", "down")
        )
        yield f"mlp.experts.local_experts.{local}.linear_fc1.weight", torch.cat([gate, up])
        yield f"mlp.experts.local_experts.{local}.linear_fc2.weight", down


def _padded(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows, torch.zeros(ROWS - len(rows), rows.shape[1])])


def plain_worker(model: str, out: str) -> None:
    """Saves the model as four checkpoints: expert and pipeline ranks, layers together and apart."""
    from moerl.trainer.model.platform import prepare

    place = prepare("cpu")
    from moerl.trainer.model import parallel
    from tests.helpers.rank_server import meet_apart

    tensors = load_file(Path(model) / "every.safetensors")
    for number, axes in enumerate(({"dp": 2, "ep": 2}, {"pp": 2})):
        meet_apart(number)
        ranks = parallel.start(ParallelConfig(**axes), place, timeout_s=60)
        for together in (True, False):
            _save_plain(tensors, ranks, Path(out), together=together)
        parallel.stop()


def _save_plain(tensors: dict[str, torch.Tensor], ranks: Any, out: Path, *, together: bool) -> None:
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=32, num_attention_heads=HEADS, num_query_groups=GROUPS,
        kv_channels=HEAD, ffn_hidden_size=48, moe_ffn_hidden_size=24, num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K, qk_layernorm=True, normalization="RMSNorm", add_bias_linear=False,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        attention_dropout=0.0, hidden_dropout=0.0,
        bias_activation_fusion=False, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, persist_layer_norm=False,
        pipeline_model_parallel_size=ranks.sizes.pp, pipeline_dtype=torch.float32,
        expert_model_parallel_size=ranks.sizes.ep, moe_token_dispatcher_type="alltoall",
    )  # fmt: skip
    layers = get_gpt_layer_local_spec(EXPERTS, False, True, normalization="RMSNorm")
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=ROWS,
        max_sequence_length=128,
        pre_process=ranks.is_first_stage,
        post_process=ranks.is_last_stage,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    live = dict(gpt.named_parameters())
    held = EXPERTS // ranks.sizes.ep
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    experts = range(ep_rank * held, (ep_rank + 1) * held)
    wanted = {"decoder.final_layernorm.weight": tensors["model.norm.weight"]}
    wanted["embedding.word_embeddings.weight"] = _padded(tensors["model.embed_tokens.weight"])
    wanted["output_layer.weight"] = _padded(tensors["lm_head.weight"])
    wanted = {name: value for name, value in wanted.items() if name in live}
    for index, layer in enumerate(gpt.decoder.layers):
        named = _plain_params(tensors, layer.layer_number - 1, experts)
        wanted |= {f"decoder.layers.{index}.{name}": value for name, value in named}
    assert wanted.keys() == live.keys()
    with torch.no_grad():
        for name, value in wanted.items():
            live[name].copy_(value)
    axis = "ep" if ranks.sizes.ep > 1 else "pp"
    folder = out / f"{axis}-{'together' if together else 'apart'}" / "iter_0000007"
    if ranks.is_first:
        folder.mkdir(parents=True)
        (folder.parent / "latest_checkpointed_iteration.txt").write_text("7")
    dist.barrier()
    state = gpt.sharded_state_dict(metadata={"non_homogeneous_layers": not together})
    dist_checkpointing.save(state, str(folder), validate_access_integrity=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four folders of Megatron-LM's form, and the model."""
    work = tmp_path_factory.mktemp("plain")
    source = HfFolder(make_model(work / "model"))
    every = {name: source.read(name).clone() for name in source.names}
    save_file(every, work / "model" / "every.safetensors")
    run_ranks(2, [__file__, "plain", str(work / "model"), str(work)])
    return work


@pytest.mark.parametrize("name", ["ep-together", "ep-apart", "pp-together", "pp-apart"])
def test_a_checkpoint_of_plain_megatron_core_is_the_model_it_was_made_of(
    plain: Path, tmp_path: Path, name: str
) -> None:
    want = load_file(plain / "model" / "every.safetensors")
    source = MegatronFolder(plain / name, plain / "model")
    assert source.path.name == "iter_0000007"
    found = _to_hf(source, tmp_path / "hf")
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)
    differ = want["model.layers.0.mlp.experts.0.gate_proj.weight"]
    assert not torch.equal(found["model.layers.1.mlp.experts.0.gate_proj.weight"], differ)
    assert not torch.equal(found["model.layers.0.mlp.experts.0.up_proj.weight"], differ)


def test_layers_are_stored_together_and_apart(plain: Path) -> None:
    """The two forms of the test above are two."""
    from moerl.trainer.checkpoints.torch_dist_files import TorchDistFiles

    together, apart = (
        TorchDistFiles(plain / name / "iter_0000007") for name in ("pp-together", "pp-apart")
    )
    assert together.shape("decoder.layers.mlp.router.weight") == (LAYERS, EXPERTS, 32)
    assert apart.shape(f"decoder.layers.{LAYERS - 1}.mlp.router.weight") == (EXPERTS, 32)
    assert together.shape("embedding.word_embeddings.weight")[0] == ROWS > VOCAB


@pytest.mark.parametrize(
    ("latest", "message"),
    [
        ("8", r"names '8', and .*iter_0000008 has no \.metadata"),
        ("release", r"names 'release', and .*release has no \.metadata"),
    ],
)
def test_a_checkpoint_that_megatron_did_not_finish_is_refused(
    tmp_path: Path, latest: str, message: str
) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(latest)
    with pytest.raises(ModelError, match=message):
        MegatronFolder(tmp_path)


def test_a_checkpoint_without_a_model_asks_for_one(plain: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json and belongs to no run; name the"):
        MegatronFolder(plain / "ep-apart")


# --- every family, both ways ---------------------------------------------------------------------
def family_worker(work: str) -> None:
    """Saves live modules of each family, and loads what the tools wrote into others."""
    from moerl.trainer.model.platform import prepare

    place = prepare("cpu")
    from megatron.core import dist_checkpointing

    from moerl.config.schema import TrainerConfig
    from moerl.trainer.model import parallel
    from moerl.trainer.model.gpt import build, live_tensors

    ranks = parallel.start(ParallelConfig(), place, timeout_s=60)
    trainer, wrong = TrainerConfig(parallel=ranks.sizes), []
    for family in CONFIGS:
        source, folder = HfFolder(Path(work) / family), Path(work) / f"{family}.saved"
        model = build(source.spec, trainer, ranks, with_replay=False)
        load_hf(live_tensors(model.gpt), model.tiles, source)
        folder.mkdir()
        dist_checkpointing.save(model.gpt.sharded_state_dict(), str(folder))
        other = build(source.spec, trainer, ranks, with_replay=False)
        state = other.gpt.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        tensors = {name: part for name, part in state.items() if "_extra_state" not in name}
        loaded = dist_checkpointing.load(tensors, str(Path(work) / f"{family}.made"))
        other.gpt.load_state_dict(loaded, strict=False)
        want, found = live_tensors(model.gpt), live_tensors(other.gpt)
        wrong += [f"{family} {n}" for n in want if not torch.equal(want[n], found[n])]
    (Path(work) / "wrong").write_text("\n".join(wrong))


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("families")
    for family in CONFIGS:
        source = _write_model(work / family, family)
        convert_to_megatron(source, work / f"{family}.made", ConversionRanks(), lambda *_: None)
    run_ranks(1, [__file__, "families", str(work)])
    return work


@pytest.mark.parametrize("family", CONFIGS)
def test_megatron_core_stores_a_family_under_the_names_that_are_read(
    families: Path, tmp_path: Path, family: str
) -> None:
    source = MegatronFolder(families / f"{family}.saved", families / family)
    found, want = (
        _to_hf(source, tmp_path / "hf"),
        load_file(families / family / "model.safetensors"),
    )
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want)


def test_megatron_core_loads_what_the_tool_wrote(families: Path) -> None:
    assert (families / "wrong").read_text() == ""


# --- a run that starts from a checkpoint ---------------------------------------------------------
def test_a_run_starts_with_the_weights_of_a_checkpoint(
    plain: Path, tmp_path: Path, tiny_model: Path
) -> None:
    """Engines, trainer and reference get one folder, made once, in the trainer's dtype."""
    from moerl.config.algorithms import ref_models_of
    from moerl.config.load import load_config
    from moerl.launch.train import prepare
    from moerl.runtime.run_dir import RunDir

    source = HfFolder(tiny_model)
    convert_to_megatron(source, tmp_path / "sft", ConversionRanks(), lambda *_: None)
    other = tmp_path / "other"  # the same model with other weights
    other.mkdir()
    for path in tiny_model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    moved = {name: value + 1 for name, value in load_file(other / "model.safetensors").items()}
    save_file(moved, other / "model.safetensors", metadata={"format": "pt"})
    settings = [f"model.path={other}", f"checkpoint.start={tmp_path / 'sft'}"]
    settings += [f"cluster.blob_dir={tmp_path / 'blobs'}", f"run.root={tmp_path}"]
    config = load_config(
        "quickstart-smoke", [*settings, "algorithm.kl=k3", "algorithm.kl_coef=0.1", "run.name=x"]
    )
    run = RunDir(tmp_path / "x")
    run.create()
    context = prepare(config, run, resume=False)
    assert context.model_path == run.root / "start" == Path(context.config.model.path)
    assert set(ref_models_of(context.config).values()) <= {str(run.root / "start")}
    found = HfFolder(context.model_path)
    assert all(torch.equal(found.read(name), source.read(name)) for name in source.names)
    assert (context.model_path / "tokenizer.json").exists()
    times = [path.stat().st_mtime_ns for path in sorted(context.model_path.iterdir())]
    prepare(context.config, run, resume=True)
    assert times == [path.stat().st_mtime_ns for path in sorted(context.model_path.iterdir())]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("missing", r"checkpoint\.start = .*: no such folder; name a run, one of its"),
        ("no checkpoint", r"checkpoint\.start = .*: no torch_dist checkpoint; name a run"),
        pytest.param(
            "another model",
            r"checkpoint\.start = .*(has shape|is missing|is not a tensor)",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_start_that_does_not_fit_is_refused(
    plain: Path, tmp_path: Path, tiny_model: Path, harm: str, message: str
) -> None:
    from moerl.config.load import load_config
    from moerl.core.errors import ConfigError
    from moerl.launch.train import prepare
    from moerl.runtime.run_dir import RunDir

    start = {
        "missing": tmp_path / "none",
        "no checkpoint": tiny_model,
        "another model": plain / "ep-apart",
    }[harm]
    settings = [f"model.path={tiny_model}", f"checkpoint.start={start}", f"run.root={tmp_path}"]
    config = load_config("quickstart-smoke", [*settings, "run.name=x"])
    run = RunDir(tmp_path / "x")
    run.create()
    with pytest.raises(ConfigError, match=message):
        prepare(config, run, resume=False)
    assert not (run.root / "start").exists()


if __name__ == "__main__":
    {"plain": plain_worker, "families": family_worker}[sys.argv[1]](*sys.argv[2:])
