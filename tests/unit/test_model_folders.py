"""Damaged model folders are refused in one sentence, before anything starts; a whole one passes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from moerl.cli import app
from moerl.config import Config, load_config
from moerl.config.checks import check_model
from moerl.config.schema import TinyModel
from moerl.config.tiny_config import tiny_config
from moerl.core.errors import ConfigError, ModelError
from moerl.data.tiny_model import VOCAB_SIZE, make_model, make_tiny_model
from moerl.launch.folder_checks import check_folder, check_folders
from moerl.layout.model_files import read_header
from moerl.planning.dry_run import describe
from moerl.trainer.hf_io.hf_folder import HfFolder

WEIGHTS, GATE = "model.safetensors", "model.layers.1.mlp.gate.weight"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    make_tiny_model(folder, TinyModel(enabled=True), seed=0)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def edit(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return harm


def written(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        fields = json.loads((folder / name).read_text())
        change(fields)
        (folder / name).write_text(json.dumps(fields))

    return harm


def cut(folder: Path, num_bytes: int) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:num_bytes])


def longer(folder: Path) -> None:
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"0" * 9)


def in_shards(folder: Path, missing: str = "", moved: str = "") -> None:
    """Two shards and their index.  missing: a shard; moved: a tensor that the index misplaces."""
    tensors = load_file(folder / WEIGHTS)
    files = {
        name: f"model-0000{1 + place % 2}-of-00002.safetensors"
        for place, name in enumerate(tensors)
    }
    for file in set(files.values()) - {missing}:
        save_file({n: t for n, t in tensors.items() if files[n] == file}, folder / file)
    if moved:
        files[moved] = next(file for file in files.values() if file != files[moved])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / WEIGHTS).unlink()


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pointer": (
        lambda f: (f / WEIGHTS).write_text(POINTER),
        f"{WEIGHTS}: it is a pointer of git-lfs",
    ),
    "cut": (lambda f: cut(f, -1000), r"and ends in tensor model\.\S+; copy it again"),
    "cut header": (lambda f: cut(f, 100), f"{WEIGHTS}: cut or not safetensors"),
    "empty": (lambda f: cut(f, 0), f"{WEIGHTS}: cut or not safetensors"),
    "longer": (longer, f"{WEIGHTS}: it has [\\d,]+ bytes, its header describes"),
    "missing": (edit(lambda t: t.pop(GATE)), f"tensor {GATE} is missing"),
    "shape": (
        edit(lambda t: t.update({GATE: t[GATE].T.contiguous()})),
        rf"{WEIGHTS}: {GATE} has shape \(128, 8\), the config says \(8, 128\)",
    ),
    "dtype": (
        edit(lambda t: t.update({GATE: t[GATE].to(torch.int32)})),
        f"{GATE} is stored as I32",
    ),
    "foreign": (
        edit(lambda t: t.update(other=t[GATE].clone())),
        "other is not a tensor of qwen3_moe",
    ),
    "shard": (
        lambda f: in_shards(f, missing="model-00002-of-00002.safetensors"),
        r"model-00002-of-00002\.safetensors: missing or unreadable",
    ),
    "index": (lambda f: in_shards(f, moved=GATE), f"has no tensor {GATE}, model.safetensors.index"),
    "config pointer": (
        lambda f: (f / "config.json").write_text(POINTER),
        r"config\.json: it is a pointer of git-lfs",
    ),
    "no tokenizer": (without_tokenizer, "it has no tokenizer, which turns text into ids"),
    "tokenizer pointer": (
        lambda f: (f / "tokenizer.json").write_text(POINTER),
        r"tokenizer\.json: it is a pointer of git-lfs",
    ),
    "token": (
        written("tokenizer.json", lambda t: t["model"]["vocab"].update(zz=VOCAB_SIZE)),
        f"it gives 'zz' the id {VOCAB_SIZE}, the embedding has {VOCAB_SIZE} rows",
    ),
    "no tokens": (
        written("tokenizer.json", lambda t: t.update(model={"vocab": {}}, added_tokens=[])),
        "it has no token, the embedding has",
    ),
    "eos": (
        written("config.json", lambda c: c.update(eos_token_id=VOCAB_SIZE)),
        rf"config\.json: eos_token_id = {VOCAB_SIZE} is no row of the embedding",
    ),
    "eos of generation": (
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": [1, 5000]}'),
        r"generation_config\.json: eos_token_id = \[1, 5000\] is no row",
    ),
}


def policy(folder: Path) -> Config:
    return load_config("quickstart-smoke", [f"model.path={folder}"])


def refusal(config: Config) -> ConfigError:
    def check() -> None:
        check_model(config)
        check_folders(config)

    with pytest.raises(ConfigError) as caught:
        check()
    return caught.value


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_folder_is_refused_with_file_and_key(folder: Path, harm: str) -> None:
    make, sentence = HARMS[harm]
    make(folder)
    error = refusal(policy(folder))
    assert (error.field, error.value) == ("model.path", str(folder))
    assert "\n" not in str(error)
    with pytest.raises(ConfigError, match=sentence):
        raise error


def test_whole_folders_pass(whole: Path, tmp_path: Path) -> None:
    """The control of all others: in one file, in shards, with an end list; ids below the rows."""
    assert check_folders(policy(whole)) == []
    shards = Path(shutil.copytree(whole, tmp_path / "shards"))
    in_shards(shards)
    written("config.json", lambda c: c.update(eos_token_id=[0, VOCAB_SIZE - 1], pad_token_id=None))(
        shards
    )
    assert check_folders(policy(shards)) == []
    assert HfFolder(shards).names == HfFolder(whole).names


def test_headers_are_those_that_safetensors_reads(whole: Path) -> None:
    found = read_header(whole / WEIGHTS)
    with safe_open(whole / WEIGHTS, "numpy") as file:
        assert set(file.keys()) == set(found)
        for name, stored in found.items():
            part = file.get_slice(name)
            assert (tuple(part.get_shape()), part.get_dtype()) == (stored.shape, stored.dtype)
            raw = (whole / WEIGHTS).read_bytes()[stored.begin : stored.end]
            assert raw == file.get_tensor(name).tobytes(), name


@pytest.mark.parametrize("harm", ["cut", "missing", "pointer"])
@pytest.mark.parametrize(
    ("field", "settings"),
    [
        (
            "algorithm.reference",
            ["algorithm.kl=k3", "algorithm.kl_coef=0.1", "algorithm.reference={}"],
        ),
        (
            "algorithm.teachers.0",
            ["algorithm.distill_coef=1", "algorithm.teachers=[{{name: '0', path: {}}}]"],
        ),
        (
            "task.rewards.asked.model",
            [
                "task.rewards=[{{name: asked, where: judge, model: {}, prompt: '{{response}}', "
                "choices: {{a: 0, b: 1}}}}]"
            ],
        ),
        (
            "task.rewards.valued.model",
            [
                "task.rewards=[{{name: valued, where: model, model: {}}}]",
                "ref_models.placement=separate",
            ],
        ),
    ],
)
def test_every_model_of_a_run_is_checked(
    whole: Path, folder: Path, field: str, settings: list[str], harm: str
) -> None:
    """Teachers, references, judges and reward models, by the setting that names them."""
    words = [f"model.path={whole}", *(one.format(folder) for one in settings)]
    config = load_config("quickstart-smoke", words)
    assert check_folders(config) == [], "the folder is whole"
    HARMS[harm][0](folder)
    error = refusal(config)
    assert (error.field, error.value) == (field, str(folder))


def test_the_folder_of_a_start_adapter_is_checked(whole: Path, tmp_path: Path) -> None:
    start = tmp_path / "adapter"
    config = load_config(
        "quickstart-smoke", [f"model.path={whole}", "lora.rank=4", f"lora.start={start}"]
    )
    assert "there is no such folder" in str(refusal(config))
    start.mkdir()
    (start / "adapter_config.json").write_text("{}")
    assert "adapter_model.safetensors: missing" in str(refusal(config))
    (start / "adapter_model.safetensors").write_text(POINTER)
    assert "pointer of git-lfs" in str(refusal(config))
    save_file({"a": torch.zeros(2)}, start / "adapter_model.safetensors")
    assert check_folders(config) == []


# --- tied heads -----------------------------------------------------------------------------------
def tied(folder: Path, head: Callable[[torch.Tensor], torch.Tensor] | None) -> Path:
    """A dense tied model with a head of its own, made of the embedding."""
    shape = tiny_config(TinyModel(enabled=True), VOCAB_SIZE, pad=0, eos=1)
    dense = {"model_type": "qwen3", "tie_word_embeddings": True, "intermediate_size": 64}
    make_model(folder, shape | dense | {"architectures": ["Qwen3ForCausalLM"]}, seed=0)
    if head is not None:
        embedding = load_file(folder / WEIGHTS)["model.embed_tokens.weight"]
        edit(lambda t: t.update({"lm_head.weight": head(embedding).contiguous()}))(folder)
    return folder


@pytest.mark.parametrize(
    ("head", "difference"),
    [
        (None, ""),
        (lambda e: e.clone(), ""),
        (lambda e: e.bfloat16(), ""),
        (lambda e: e + 0.25 * (torch.arange(len(e)) == 7)[:, None], "by up to 0.25"),
        (lambda e: (e + 1).bfloat16(), r"by up to 1\.?\d*"),
        (lambda e: e[:50], r"its shape is \(50, 128\)"),
        (lambda e: e * float("nan"), "by up to inf"),
    ],
)
def test_a_head_beside_a_tied_embedding(
    tmp_path: Path, head: Callable[[torch.Tensor], torch.Tensor] | None, difference: str
) -> None:
    folder = tied(tmp_path / "model", head)
    if not difference:
        check_folder("model.path", str(folder), has_text=True)
        return
    with pytest.raises(ConfigError, match=f"lm_head.weight differs .*{difference}.*leaves it out"):
        check_folder("model.path", str(folder), has_text=True)


# --- numbers --------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_named_when_it_is_read(folder: Path, value: float) -> None:
    edit(lambda t: t[GATE].__setitem__((0, 3), value))(folder)
    check_folders(policy(folder))  # no header says it
    source = HfFolder(folder)
    source.read(GATE, (range(1, 8), range(128)))  # the other rows
    with pytest.raises(ModelError, match=rf"{WEIGHTS}: {GATE} holds (NaN|an infinite number)"):
        source.read(GATE)


# --- commands -------------------------------------------------------------------------------------
def test_a_dry_run_checks_what_is_there(whole: Path, folder: Path, tmp_path: Path) -> None:
    words = [f"run.root={tmp_path}", f"model.path={folder}"]
    config = load_config("quickstart-smoke", words)
    assert "has no weights here" not in describe(config, [])
    (folder / WEIGHTS).unlink()
    assert f"model.path: {folder} has no weights here" in describe(config, [])
    shutil.copy(whole / WEIGHTS, folder)
    HARMS["missing"][0](folder)
    with pytest.raises(ConfigError, match=f"tensor {GATE} is missing"):
        describe(config, [])


def test_check_layout_reads_the_headers(folder: Path) -> None:
    def run() -> Any:
        return CliRunner().invoke(app, ["check-layout", str(folder)])

    assert "files: every tensor is there" in run().stdout
    HARMS["shape"][0](folder)
    assert f"{GATE} has shape" in str(run().exception)


@pytest.mark.parametrize("command", [["--dry-run"], []])
def test_a_name_of_the_hub_says_how_to_fetch_it(command: list[str]) -> None:
    found = CliRunner().invoke(
        app, ["train", "quickstart-smoke", "model.path=Qwen/Qwen3-30B-A3B", *command]
    )
    assert isinstance(found.exception, ConfigError)
    assert found.exception.field == "model.path"
    assert "hf download Qwen/Qwen3-30B-A3B --local-dir Qwen3-30B-A3B" in str(found.exception)
