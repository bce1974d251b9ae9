"""Conversions in one process: every family back bitwise, quantised sources, failures, memory.

Source folders are written by transformers, and results are opened by transformers, so a wrong name
or a wrong stack does not cancel out.  Dequantisation is compared with loops over blocks.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moerl.core.errors import ConfigError, ModelError, MoerlError
from moerl.layout import hf_shapes, model_spec
from moerl.trainer.checkpoints import convert, convert_output
from moerl.trainer.checkpoints.convert import convert_to_hf, convert_to_megatron
from moerl.trainer.checkpoints.convert_cli import hf_to_megatron
from moerl.trainer.checkpoints.convert_output import ConversionRanks
from moerl.trainer.checkpoints.megatron_folder import MegatronFolder
from moerl.trainer.hf_io.hf_folder import HfFolder
from tests.helpers.nested_model import nest
from tests.helpers.rank_server import run_code

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = json.loads((ROOT / "tests/data/layout_families.json").read_text())
MAIN = "model.safetensors"


def silent(stage: str, done: int, total: int) -> None:
    assert done <= total, f"{stage}: {done} of {total} bytes"


def to_megatron(source: Path, target: Path, **more: object) -> Path:
    progress = more.pop("progress", silent)
    convert_to_megatron(HfFolder(source), target, ConversionRanks(), progress, **more)
    return target


def to_hf(source: Path, target: Path, **more: object) -> Path:
    convert_to_hf(MegatronFolder(source), target, ConversionRanks(), silent, **more)
    return target


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per family, saved by transformers; every element is drawn, norms included."""
    from moerl.engine.torchvision_fix import arm

    arm()
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("families")
    for family, config in CONFIGS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if "inv_freq" not in name:
                    tensor.normal_()
        model.save_pretrained(folder / family)
        nest(folder / family, config)
    return folder


@pytest.fixture
def model(tmp_path: Path, models: Path) -> Path:
    return Path(shutil.copytree(models / "qwen3_moe", tmp_path / "model"))


def contents(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for path in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def assert_same(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


# --- round trips ---------------------------------------------------------------------------------
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_comes_back_under_the_names_of_both_layer_specs(
    tmp_path: Path, models: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one file and in several, in chunks of a few rows, and back in one shard and in several."""
    source = HfFolder(models / family)
    want = {name: source.read(name) for name in source.names}
    for layer_spec, size in (("local", 30_000), ("te", 2**30)):
        checkpoint = to_megatron(
            models / family, tmp_path / layer_spec, layer_spec=layer_spec, max_file_bytes=size
        )
        out = HfFolder(to_hf(checkpoint, tmp_path / f"hf{size}", max_shard_bytes=size))
        assert_same({name: out.read(name) for name in out.names}, want)
        monkeypatch.setattr(convert, "CHUNK_BYTES", 1000)
    assert (tmp_path / "hf30000" / "model.safetensors.index.json").exists()
    assert len(list((tmp_path / "local").glob("*.distcp"))) > 1


@pytest.mark.parametrize("family", CONFIGS)
def test_transformers_opens_the_result_with_equal_weights(
    tmp_path: Path, models: Path, family: str
) -> None:
    from transformers import AutoModelForCausalLM

    a = to_megatron(models / family, tmp_path / "a")
    out = to_hf(a, tmp_path / "hf")
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    keys = ("missing_keys", "unexpected_keys", "mismatched_keys")
    assert not any(info[key] for key in keys), {key: info[key] for key in keys}
    assert_same(
        model.state_dict(), AutoModelForCausalLM.from_pretrained(models / family).state_dict()
    )


def test_a_swapped_tile_is_noticed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the comparison above sees one wrong expert."""
    a = to_megatron(model, tmp_path / "a")
    read = MegatronFolder.read

    def wrong(self: MegatronFolder, name: str, *box: object) -> torch.Tensor:
        return read(self, name.replace("experts.1.", "experts.0."), *box)

    monkeypatch.setattr(MegatronFolder, "read", wrong)
    found = contents(to_hf(a, tmp_path / "hf"))
    source = HfFolder(model)
    differ = [n for n in source.names if not torch.equal(found[n], source.read(n))]
    assert differ
    assert all("experts.1." in name for name in differ)


def test_dtype_conversion_rounds_once_and_keeps_what_is_pinned(
    tmp_path: Path, models: Path
) -> None:
    source = HfFolder(models / "deepseek_v3")
    a = to_megatron(models / "deepseek_v3", tmp_path / "a", dtype=torch.bfloat16)
    out = HfFolder(to_hf(a, tmp_path / "hf"))
    assert out.spec.dtype == "bfloat16"
    for name in source.names:
        pinned = name.endswith("e_score_correction_bias")
        want = source.read(name) if pinned else source.read(name).bfloat16()
        assert torch.equal(out.read(name), want), name
        assert out.dtype(name) == want.dtype


# --- quantised sources ---------------------------------------------------------------------------
def rewrite(folder: Path, change: dict[str, torch.Tensor | None], **config: object) -> None:
    tensors = contents(folder) | change
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file({k: v.contiguous() for k, v in tensors.items() if v is not None}, folder / MAIN)
    old = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(old | config))


def per_expert(folder: Path) -> None:
    """Give the folder one tensor per expert, as released checkpoints have it."""
    source = HfFolder(folder)
    stacked = {name: None for name in contents(folder) if name not in source.names}
    rewrite(folder, stacked | {name: source.read(name).clone() for name in source.names})


def test_fp8_blocks_are_dequantised(tmp_path: Path, model: Path) -> None:
    per_expert(model)
    block, fp8 = (12, 16), torch.float8_e4m3fn
    change: dict[str, torch.Tensor | None] = {}
    want = {}
    for name, weight in contents(model).items():
        if not name.endswith("_proj.weight"):
            continue
        rows, cols = weight.shape
        scale = torch.rand(-(-rows // block[0]), -(-cols // block[1])) + 0.5
        quantised = weight.to(fp8)
        want[name] = torch.empty_like(weight)
        for r in range(rows):
            for c in range(0, cols, block[1]):
                part = slice(c, c + block[1])
                factor = scale[r // block[0], c // block[1]]
                want[name][r, part] = quantised[r, part].float() * factor
        change |= {name: quantised, f"{name}_scale_inv": scale}
    settings = {"quant_method": "fp8", "weight_block_size": list(block)}
    rewrite(model, change, quantization_config=settings, dtype="bfloat16")
    source = HfFolder(model)
    name = next(iter(want))
    assert source.dtype(name) == torch.bfloat16
    assert torch.equal(source.read(name, (range(5, 31), range(7, 23))), want[name][5:31, 7:23])

    found = contents(
        to_hf(to_megatron(model, tmp_path / "a", dtype=torch.bfloat16), tmp_path / "hf")
    )
    for name, value in want.items():
        assert torch.equal(found[name], value.bfloat16()), name
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())


def test_fp8_without_scales_is_refused(model: Path) -> None:
    per_expert(model)
    name = "model.layers.0.self_attn.q_proj.weight"
    rewrite(model, {name: contents(model)[name].to(torch.float8_e4m3fn)})
    with pytest.raises(ModelError, match=rf"{name} is stored as F8_E4M3"):
        HfFolder(model)
    rewrite(model, {f"{name}_scale_inv": torch.ones(3, 1)})
    with pytest.raises(ModelError, match=rf"{name}_scale_inv has shape \(3, 1\)"):
        HfFolder(model)


def test_mxfp4_experts_are_dequantised(tmp_path: Path, models: Path) -> None:
    """Against the format's definition, value by value; plain and packed files are transposed."""
    model = Path(shutil.copytree(models / "gpt_oss", tmp_path / "model"))
    config = CONFIGS["gpt_oss"]
    hidden, experts = config["hidden_size"], config["num_local_experts"]
    table = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    rewrite(model, {}, intermediate_size=32)
    change: dict[str, torch.Tensor | None] = {}
    want: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(2)
    for name in contents(model):
        stack = name.rpartition(".")[2]
        if stack == "gate_up_proj_bias":
            change[name] = torch.randn(experts, 64, generator=generator)
        if stack not in ("gate_up_proj", "down_proj"):
            continue
        rows = 64 if stack == "gate_up_proj" else hidden
        cols = hidden if stack == "gate_up_proj" else 32
        shape = (experts, rows, cols // 32)
        packed = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 134, shape, generator=generator, dtype=torch.uint8)
        change |= {name: None, f"{name}_blocks": packed, f"{name}_scales": scales}
        real = torch.empty(experts, rows, cols)
        for e, r, g, i in torch.cartesian_prod(*map(torch.arange, packed.shape)).tolist():
            byte, factor = int(packed[e, r, g, i]), 2.0 ** (int(scales[e, r, g]) - 127)
            for half, code in enumerate((byte & 15, byte >> 4)):
                sign = -1.0 if code & 8 else 1.0
                real[e, r, g * 32 + 2 * i + half] = sign * table[code & 7] * factor
        want[name] = real
    rewrite(model, change, dtype="bfloat16", quantization_config={"quant_method": "mxfp4"})
    a = to_megatron(model, tmp_path / "a", dtype=torch.bfloat16)
    found = contents(to_hf(a, tmp_path / "hf"))
    assert want
    for name, value in want.items():
        assert torch.equal(found[name], value.mT.bfloat16()), name


# --- failures ------------------------------------------------------------------------------------
TOOL = """
import resource, runpy, sys
tool, limit = sys.argv.pop(1), int(sys.argv.pop(1))
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
runpy.run_path(f"tools/{tool}", run_name="__main__")
"""


def run_tool(tool: str, *args: object, limit: int = 0) -> subprocess.CompletedProcess[str]:
    return run_code(TOOL, tool, str(limit), *map(str, args))


def test_a_full_disk_names_the_tensor_and_leaves_nothing(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "out"
    command = ("hf_to_megatron.py", model, out)
    failed = run_tool(*command, limit=40_000)
    last = failed.stderr.strip().splitlines()[-1]
    assert failed.returncode == 2
    assert last.startswith("error: ")
    assert "cannot write tensor " in last
    assert "File too large" in last
    assert os.listdir(tmp_path) == ["model"]
    assert run_tool(*command).returncode == 0
    assert MegatronFolder(out).names == HfFolder(model).names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_a_disk_too_small_is_refused_before_writing(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=40_000)
    monkeypatch.setattr(convert_output.shutil, "disk_usage", lambda path: usage)
    want = r"out: needs \d{3},\d{3} bytes and its disk has 40,000; free"
    with pytest.raises(ModelError, match=want):
        to_megatron(model, tmp_path / "out")
    assert os.listdir(tmp_path) == ["model"]


def last_tensor(file: Path) -> str:
    body = file.read_bytes()
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    header.pop("__metadata__", None)
    return str(max(header, key=lambda name: header[name]["data_offsets"][1]))


def test_a_folder_without_a_checkpoint_is_refused_with_what_is_read(
    tmp_path: Path, model: Path
) -> None:
    (tmp_path / "other" / "rank-00000").mkdir(parents=True)
    (tmp_path / "other" / "manifest.json").write_text(json.dumps({"format": "another"}))
    for folder in (tmp_path / "other", model):
        with pytest.raises(ModelError, match="no torch_dist checkpoint; name a run, one of its"):
            MegatronFolder(folder)


@pytest.mark.parametrize("harm", ["truncated", "missing", "shape"])
def test_unusable_sources_are_one_sentence(
    tmp_path: Path,
    model: Path,
    harm: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = next(name for name in contents(model) if name.endswith("mlp.gate.weight"))
    if harm == "truncated":  # whichever the file holds last
        name = last_tensor(model / MAIN)
    if harm == "truncated":
        (model / MAIN).write_bytes((model / MAIN).read_bytes()[:-10])
    else:
        rewrite(model, {name: None if harm == "missing" else torch.zeros(3, 3)})
    monkeypatch.setattr(sys, "argv", ["tool", str(model), str(tmp_path / "out")])
    assert hf_to_megatron(None) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert name in line
    assert os.listdir(tmp_path) == ["model"]


def test_an_existing_target_is_kept_unless_forced(tmp_path: Path, model: Path) -> None:
    a = to_megatron(model, tmp_path / "a")
    name = "model.norm.weight"
    with pytest.raises(ModelError, match="a exists; choose another folder"):
        to_megatron(model, a, dtype=torch.bfloat16)
    assert MegatronFolder(a).dtype(name) == torch.float32
    to_megatron(model, a, dtype=torch.bfloat16, replace=True)
    assert MegatronFolder(a).dtype(name) == torch.bfloat16


def four_files(model: Path) -> int:
    """Size of a file with which the model has four."""
    return sum(v.nbytes for v in contents(model).values()) * 3 // 10


def test_a_killed_process_leaves_nothing_that_looks_complete(tmp_path: Path, model: Path) -> None:
    code = f"""
import os, signal
from moerl.trainer.checkpoints.convert import convert_to_megatron
from moerl.trainer.checkpoints.convert_output import ConversionRanks
from moerl.trainer.hf_io.hf_folder import HfFolder
def kill(stage, done, total):
    if done > 100_000:
        os.kill(os.getpid(), signal.SIGKILL)
convert_to_megatron(HfFolder({str(model)!r}), {str(tmp_path / "out")!r}, ConversionRanks(), kill)
"""
    ended = run_code(code)
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    with pytest.raises(MoerlError):
        MegatronFolder(tmp_path / ".out.partial")
    per_expert(model)
    changed = contents(model)["model.embed_tokens.weight"] + 1
    rewrite(model, {"model.embed_tokens.weight": changed})
    to_megatron(model, tmp_path / "out")
    found = MegatronFolder(tmp_path / "out").read("model.embed_tokens.weight")
    assert torch.equal(found, changed), "no file of the killed conversion is used"
    assert sorted(os.listdir(tmp_path)) == ["model", "out"]


def test_two_conversions_to_one_folder_do_not_mix(tmp_path: Path, model: Path) -> None:
    def again(stage: str, done: int, total: int) -> None:
        with pytest.raises(ModelError, match="another conversion is writing there"):
            to_megatron(model, tmp_path / "out")

    to_megatron(model, tmp_path / "out", progress=again)
    assert MegatronFolder(tmp_path / "out").names == HfFolder(model).names


def test_bytes_that_changed_on_the_disk_are_noticed(tmp_path: Path, model: Path) -> None:
    out, size = tmp_path / "out", four_files(model)

    def harm(stage: str, done: int, total: int) -> None:
        last = tmp_path / ".out.partial" / "__3_0.distcp"
        if stage == "verifying" and done < total / 2:
            data = last.read_bytes()
            last.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    with pytest.raises(ModelError, match=r"__3_0\.distcp: does not read back as it was written"):
        to_megatron(model, out, max_file_bytes=size, progress=harm)
    assert not out.exists()


def test_a_damaged_checkpoint_is_refused(tmp_path: Path, model: Path) -> None:
    a = to_megatron(model, tmp_path / "a")
    data = a / "__0_0.distcp"
    good = data.read_bytes()
    middle = len(good) // 2
    data.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
    with pytest.raises(ModelError, match=r"a: damaged: __0_0\.distcp does not match its digest"):
        to_hf(a, tmp_path / "hf")
    data.write_bytes(good[:-1])
    with pytest.raises(
        ModelError, match=r"damaged: __0_0\.distcp holds \d+ bytes, \d+ were written"
    ):
        to_hf(a, tmp_path / "hf")
    data.unlink()
    with pytest.raises(ModelError, match=r"damaged: .*No such file"):
        to_hf(a, tmp_path / "hf")
    data.write_bytes(good)
    (a / ".metadata").write_bytes(b"")
    with pytest.raises(ModelError, match=r"damaged: \.metadata holds 0 bytes"):
        to_hf(a, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_files_without_digests_are_refused_where_they_end_early(
    tmp_path: Path, model: Path
) -> None:
    """Those of Megatron-LM have no manifest."""
    a = to_megatron(model, tmp_path / "a")
    (a / "manifest.json").unlink()
    data = a / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(ModelError, match=r"__0_0\.distcp: tensor .* cannot be read"):
        to_hf(a, tmp_path / "hf")
    (a / ".metadata").write_bytes((a / ".metadata").read_bytes()[:-20])
    with pytest.raises(ModelError, match=r"\.metadata: cannot be read"):
        to_hf(a, tmp_path / "hf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 5}, r"tensor decoder\.layers\.4\..* is missing; .*\(qwen3_moe\)"),
        ({"num_hidden_layers": 1}, r"decoder\.layers\.1\..* is not a tensor of the qwen3_moe"),
        ({"moe_intermediate_size": 48}, r"linear_fc1\.weight has shape \(.*\) says \(96, 32\)"),
        ({"num_experts": 4}, r"has shape"),
        ({"num_experts": 16}, r"is missing|has shape"),
        ({"vocab_size": 1000}, r"embedding\.word_embeddings\.weight has shape"),
        ({"model_type": "gpt2"}, r"model_type = 'gpt2' has no layout"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_tensor(
    tmp_path: Path, model: Path, change: dict[str, object], message: str
) -> None:
    a = to_megatron(model, tmp_path / "a")
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=message):
        MegatronFolder(a, other)


class Harmful:
    """Runs a command where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_checkpoint_of_a_stranger_runs_no_code(tmp_path: Path, model: Path) -> None:
    a = to_megatron(model, tmp_path / "a")
    (a / "manifest.json").unlink()
    mark = tmp_path / "mark"
    (a / "common.pt").write_bytes(pickle.dumps(Harmful(mark)))
    to_hf(a, tmp_path / "hf")
    (a / ".metadata").write_bytes(pickle.dumps(Harmful(mark)))
    with pytest.raises(ModelError, match=r"posix\.mkdir does not describe a tensor"):
        MegatronFolder(a)
    assert not mark.exists()


def test_parts_of_several_dtypes_need_a_choice(tmp_path: Path, model: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    rewrite(model, {name: contents(model)[name].bfloat16()})
    with pytest.raises(ConfigError, match=r"linear_qkv.weight is made of bfloat16, float32"):
        to_megatron(model, tmp_path / "a")
    to_megatron(model, tmp_path / "a", dtype=torch.float32)


# --- memory --------------------------------------------------------------------------------------
MEASURE = """
import re, sys
from pathlib import Path
import torch
from moerl.trainer.checkpoints.convert import convert_to_hf, convert_to_megatron
from moerl.trainer.checkpoints.convert_output import ConversionRanks
from moerl.trainer.checkpoints.megatron_folder import MegatronFolder
from moerl.trainer.hf_io.hf_folder import HfFolder
source, a, hf = sys.argv[1:]
def peak():  # not ru_maxrss: that begins at the peak of the process which started this one
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
torch.zeros(1).bfloat16()
start = peak()
quiet = lambda stage, done, total: None
convert_to_megatron(HfFolder(source), a, ConversionRanks(), quiet)
print(peak() - start)
convert_to_hf(MegatronFolder(a), hf, ConversionRanks(), quiet)
print(peak() - start)
folder = HfFolder(source)
whole = [folder.read(name).clone() for name in folder.names]
print(peak() - start)
"""


@pytest.mark.parametrize(
    ("experts", "slack"), [(16, 200), pytest.param(128, 300, marks=pytest.mark.full)]
)
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path, experts: int, slack: int) -> None:
    """There and back in the largest tensor and a constant; a model that is read whole is seen.

    With 128 experts the model has more than 1 GB.
    """
    config = CONFIGS["qwen3_moe"] | {
        "hidden_size": 512,
        "moe_intermediate_size": 768,
        "num_experts": experts,
        "num_hidden_layers": 6,
        "vocab_size": 60_000,
        "dtype": "bfloat16",
    }
    folder = tmp_path / "model"
    folder.mkdir()
    shapes = hf_shapes(model_spec(config))
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: torch.ones(s, dtype=torch.bfloat16) for n, s in shapes.items()}, folder / MAIN)
    bound = max(2 * math.prod(shape) for shape in shapes.values()) + slack * 10**6
    size = (folder / MAIN).stat().st_size
    assert size > bound
    words = (str(folder), str(tmp_path / "a"), str(tmp_path / "hf"))
    ended = run_code(MEASURE, *words, timeout_s=300.0)
    assert ended.returncode == 0, ended.stderr
    there, back, whole = map(int, ended.stdout.split())
    print(f"model {size:,}: {there:,} there, {back:,} back, bound {bound:,}, read whole {whole:,}")
    assert max(there, back) <= bound
    assert whole > size
