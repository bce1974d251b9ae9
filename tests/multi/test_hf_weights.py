"""Folders, live models and the gather, each against something outside the layout tables.

Live names and shapes come from real GPTModels (one process plays every rank of every mesh, on
torch's fake process group), saved folders are opened by transformers, the gather runs over two and
four gloo processes.  Workers are this file run as a program.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moerl.config.schema import ParallelConfig
from moerl.core.errors import LayoutError, ModelError, TrainerError
from moerl.layout import hf_shapes, megatron_tiles, model_spec
from moerl.trainer.hf_io import hf_shards
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf
from moerl.trainer.hf_io.hf_shards import HfShards, RankGroup, every_rank
from tests.helpers.hf_gather import HfGather
from tests.helpers.rank_server import run_ranks
from tests.helpers.saved_hf import save_hf

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 130,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 128,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
GATE = "model.layers.1.mlp.gate.weight"


def make_tensors(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = hf_shapes(model_spec(config))
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_folder(path: Path, tensors: dict[str, torch.Tensor], config: dict) -> Path:
    """A model folder written without `save_hf`."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def stack_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The other file form: [E, 2F, h] with gate rows first, and [E, h, F]."""
    out = {name: value for name, value in tensors.items() if ".experts." not in name}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts."

        def of(kind: str, prefix: str = prefix) -> list[torch.Tensor]:
            return [
                tensors[f"{prefix}{expert}.{kind}_proj.weight"]
                for expert in range(CONFIG["num_experts"])
            ]

        gate_up = [torch.cat(pair) for pair in zip(of("gate"), of("up"), strict=True)]
        out[prefix + "gate_up_proj"] = torch.stack(gate_up)
        out[prefix + "down_proj"] = torch.stack(of("down"))
    return out


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return make_tensors(CONFIG)


@pytest.fixture
def folder(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    return write_folder(tmp_path / "model", tensors, CONFIG)


def empty_params(tiles: dict, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.full(local.shape, torch.nan, dtype=dtype) for name, local in tiles.items()}


# --- reading -------------------------------------------------------------------------------------
def test_stacked_files_read_as_one_expert_per_tensor(
    tmp_path: Path, folder: Path, tensors: dict[str, torch.Tensor]
) -> None:
    stacked = HfFolder(write_folder(tmp_path / "stacked", stack_experts(tensors), CONFIG))
    assert stacked.names == HfFolder(folder).names == tuple(tensors)
    for name, want in tensors.items():
        assert torch.equal(stacked.read(name), want), name
        rows, *rest = (range(n) for n in want.shape)
        half = (rows[len(rows) // 2 :], *rest)
        assert torch.equal(stacked.read(name, half), want[len(rows) // 2 :]), name


def test_load_casts_fills_and_zeroes_padding(
    folder: Path, tensors: dict[str, torch.Tensor]
) -> None:
    source = HfFolder(folder)
    tiles = megatron_tiles(source.spec, ParallelConfig(), 0)
    params = empty_params(tiles, torch.bfloat16)
    load_hf(params, tiles, source)
    assert not any(param.isnan().any() for param in params.values())
    embed = params["embedding.word_embeddings.weight"]
    assert torch.equal(embed[:130], tensors["model.embed_tokens.weight"].bfloat16())
    assert not embed[130:].any()


def test_load_refuses_a_parameter_without_a_rule(folder: Path) -> None:
    source = HfFolder(folder)
    tiles = megatron_tiles(source.spec, ParallelConfig(), 0)
    params = empty_params(tiles) | {"decoder.extra.weight": torch.zeros(1)}
    with pytest.raises(LayoutError, match=r"decoder\.extra\.weight: no layout rule"):
        load_hf(params, tiles, source)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("no folder", "no such model folder"),
        ("no config", r"config\.json: there is no such file"),
        ("no weights", r"has neither model\.safetensors nor"),
        ("truncated", r"model\.safetensors: it has [\d,]+ bytes of [\d,]+ and ends in tensor"),
        ("missing", rf"tensor {GATE} is missing"),
        ("shape", rf"{GATE} has shape \(32, 4\), the config says \(4, 32\)"),
        ("unknown", r"model\.layers\.0\.self_attn\.q_proj\.bias is not a tensor of qwen3_moe"),
        ("fp8", rf"{GATE} is stored as F8_E4M3; readable: F32, BF16, F16"),
        ("family", r"model_type = 'gpt2' has no layout"),
        ("index", r"model-00001-of-00001\.safetensors: missing or unreadable: No such file"),
        ("index name", rf"other\.safetensors: has no tensor {GATE}"),
    ],
)
def test_unusable_folders_are_refused_by_name(
    folder: Path, tensors: dict[str, torch.Tensor], harm: str, message: str
) -> None:
    weights, changed = folder / "model.safetensors", dict(tensors)
    if harm == "no folder":
        shutil.rmtree(folder)
    elif harm == "no config":
        (folder / "config.json").unlink()
    elif harm == "no weights":
        weights.unlink()
    elif harm == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif harm == "family":
        (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": "gpt2"}))
    elif harm.startswith("index"):
        file = "other.safetensors" if harm == "index name" else "model-00001-of-00001.safetensors"
        index = {"weight_map": dict.fromkeys(tensors, file)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        if harm == "index name":
            del changed[GATE]
            save_file(changed, folder / file)
    else:
        if harm == "missing":
            del changed[GATE]
        elif harm == "shape":
            changed[GATE] = changed[GATE].T.contiguous()
        elif harm == "unknown":
            changed["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        elif harm == "fp8":
            changed[GATE] = changed[GATE].to(torch.float8_e4m3fn)
        save_file(changed, weights)
    with pytest.raises(ModelError, match=message):
        HfFolder(folder)


# --- saving --------------------------------------------------------------------------------------
@pytest.mark.parametrize("max_shard_bytes", [2**32, 20_000])
def test_saved_folder_opens_in_transformers(
    tmp_path: Path, folder: Path, tensors: dict[str, torch.Tensor], max_shard_bytes: int
) -> None:
    """No missing, unexpected or mismatched key, the same values, the tokenizer files beside."""
    from moerl.engine.torchvision_fix import arm

    arm()  # a CUDA torchvision beside a CPU torch
    from transformers import AutoModelForCausalLM

    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"do_sample": true}')
    out = tmp_path / "runs" / "hf"
    changed = {name: value + 1 for name, value in tensors.items()}
    save_hf(out, tensors, folder, max_shard_bytes=max_shard_bytes)
    save_hf(out, changed, folder, max_shard_bytes=max_shard_bytes)  # replaces the first
    assert [path.name for path in out.parent.iterdir()] == ["hf"]
    assert (out / "tokenizer_config.json").exists()
    assert (out / "generation_config.json").exists()
    assert (out / "model.safetensors.index.json").exists() == (max_shard_bytes == 20_000)
    assert len({path.stat().st_mode for path in out.iterdir() if path.is_file()}) == 1

    again = HfFolder(out)
    assert all(torch.equal(again.read(name), value) for name, value in changed.items())
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32
    state = model.state_dict()
    for name, want in stack_experts(changed).items():
        assert torch.equal(state[name], want), name


def test_saved_config_says_the_dtype_of_the_tensors(
    tmp_path: Path, folder: Path, tensors: dict[str, torch.Tensor]
) -> None:
    save_hf(tmp_path / "out", {k: v.bfloat16() for k, v in tensors.items()}, folder)
    assert HfFolder(tmp_path / "out").spec.dtype == "bfloat16"


def test_save_refuses_an_incomplete_model_and_keeps_the_old_folder(
    tmp_path: Path, folder: Path, tensors: dict[str, torch.Tensor]
) -> None:
    out = tmp_path / "out"
    save_hf(out, tensors, folder)
    before = (out / "model.safetensors").read_bytes()
    for change, message in (
        ({GATE: None}, f"{GATE}: the layout has this tensor, the live module does not"),
        ({"lm_head.bias": torch.zeros(1)}, r"lm_head\.bias: no layout rule covers this"),
        ({GATE: torch.zeros(2)}, rf"{GATE}: live shape \(2,\), the layout says \(4, 32\)"),
    ):
        bad = {k: v for k, v in (tensors | change).items() if v is not None}
        with pytest.raises(LayoutError, match=message):
            save_hf(out, bad, folder)
    assert (out / "model.safetensors").read_bytes() == before


# --- several ranks -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "axes",
    [{"ep": 2, "dp": 2}, {"tp": 2, "pp": 2, "ep": 2}],
    ids=lambda axes: "-".join(f"{k}{v}" for k, v in axes.items()),
)
def test_ranks_gather_and_save_the_folder_bitwise(
    tmp_path: Path, folder: Path, tensors: dict[str, torch.Tensor], axes: dict[str, int]
) -> None:
    out = tmp_path / "gathered"
    arguments = [__file__, "gather", str(folder), str(out), json.dumps(axes)]
    run_ranks(ParallelConfig(**axes).world_size, arguments)
    first, changed = (load_file(f"{out}.{i}") for i in range(2))
    assert first.keys() == changed.keys() == tensors.keys()
    for name, want in tensors.items():
        assert torch.equal(first[name], want), name
        assert torch.equal(changed[name], 2 * want), name
    saved = HfFolder(f"{out}.hf")  # a failed save leaves the one before
    assert len(list(saved.path.glob("*.safetensors"))) > 4
    assert all(torch.equal(saved.read(name), 2 * want) for name, want in tensors.items())
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_live_models_have_exactly_the_tensors_of_the_layout() -> None:
    """Oracle: named_parameters() of megatron-core's GPTModel on every rank of several meshes."""
    assert "checked 22 ranks" in run_ranks(1, [__file__, "live"])


def gather_worker(folder: str, out: str, axes: str) -> None:
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    layout, source = ParallelConfig(**json.loads(axes)), HfFolder(folder)
    store_file = f"file://{out}.store"
    dist.init_process_group("gloo", store_file, rank=rank, world_size=layout.world_size)
    tiles = megatron_tiles(source.spec, layout, rank)
    params = empty_params(tiles)
    load_hf(params, tiles, source)
    gather = HfGather(lambda: params, source.spec, layout, rank, "local", dist.group.WORLD)

    def store(whole: dict[str, torch.Tensor] | None, number: int) -> None:
        assert (whole is not None) == (rank == 0)
        if whole is not None:
            assert list(whole) == list(source.names)
            save_file(whole, f"{out}.{number}")

    store(gather.gather(), 0)
    for param in params.values():
        param *= 2
    store(gather.gather(), 1)
    hf_shards.BUCKET_BYTES = 10_000  # several messages per file
    held, ranks = every_rank(source.spec, layout, "local"), RankGroup(rank, dist.group.WORLD)
    saver = HfShards(lambda: params, held, ranks, folder, max_shard_bytes=20_000)
    assert len(set(saver._writers.values())) > 1, "one rank writes everything"
    saver.save(f"{out}.hf")
    if rank == layout.world_size - 1:  # its disk is full

        def refuse(*_: object) -> None:
            raise OSError(28, "No space left on device")

        saver._write_file = refuse
    with pytest.raises(TrainerError, match=r"\.safetensors: .*No space left on device"):
        saver.save(f"{out}.hf")
    dist.destroy_process_group()


def live_worker() -> None:
    """Builds GPTModel as each rank of each mesh; the fake group moves nothing and never waits."""
    from moerl.trainer.model.platform import prepare

    platform = prepare("cpu")
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from moerl.config.schema import ParallelConfig, TrainerConfig
    from moerl.layout import check_covers, padded_vocab
    from moerl.trainer.model.transformer import transformer_config

    num = 0
    for axes, tied in (
        ({}, False),
        ({}, True),
        ({"ep": 2, "dp": 2}, False),
        ({"tp": 2, "etp": 2}, False),
        ({"tp": 2, "ep": 2, "etp": 1}, False),
        ({"pp": 2}, True),
        ({"tp": 2, "pp": 2, "ep": 2, "etp": 2, "dp": 2}, False),
        ({"tp": 4, "ep": 4}, False),
    ):
        spec, sizes = model_spec(CONFIG | {"tie_word_embeddings": tied}), ParallelConfig(**axes)
        for rank in range(sizes.world_size):
            dist.init_process_group(
                "fake", store=FakeStore(), rank=rank, world_size=sizes.world_size
            )
            parallel_state.initialize_model_parallel(
                sizes.tp,
                sizes.pp,
                expert_model_parallel_size=sizes.ep,
                expert_tensor_parallel_size=sizes.etp,
                create_gloo_process_groups=False,
            )
            tensor_parallel.model_parallel_cuda_manual_seed(1)
            config = transformer_config(
                spec, TrainerConfig(parallel=sizes), platform, with_replay=False
            )
            gpt = GPTModel(
                config=config,
                transformer_layer_spec=get_gpt_decoder_block_spec(
                    config, use_transformer_engine=False, normalization="RMSNorm"
                ),
                vocab_size=padded_vocab(spec, sizes.tp),
                max_sequence_length=spec.max_positions,
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
                share_embeddings_and_output_weights=tied,
                position_embedding_type="rope",
            )
            live = {name: tuple(param.shape) for name, param in gpt.named_parameters()}
            check_covers(megatron_tiles(spec, sizes, rank), live)
            num += 1
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    print(f"checked {num} ranks")


if __name__ == "__main__":
    {"gather": gather_worker, "live": live_worker}[sys.argv[1]](*sys.argv[2:])
