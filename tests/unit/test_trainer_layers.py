"""`trainer.transformer_impl`: whose layers a rank has, and what it says where they are missing."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moerl.config import load_config
from moerl.config.schema import ParallelConfig
from moerl.core.errors import ConfigError
from moerl.layout import layers_of, model_spec
from moerl.planning.estimates import model_shapes
from moerl.planning.memory import Training, trainer_memory, training_of
from moerl.trainer.model.platform import need_transformer_engine, prepare
from tests.helpers.rank_server import run_code

REMEDY = r"trainer\.transformer_impl = 'auto' .*or set trainer\.transformer_impl=local"
ON_CUDA = """
import sys, torch
from moerl.distributed import numa
from moerl.trainer.model import platform
sys.path.insert(0, sys.argv[1])
try:
    import transformer_engine
except FileNotFoundError as error:
    print(type(error).__name__)
torch.cuda.is_available, torch.cuda.set_device = lambda: True, lambda _: None
vars(numa)["bind"] = lambda _: None
place = platform.prepare("cuda", impl="local")
try:
    import transformer_engine
except ImportError as error:
    print(type(error).__name__)
print(place.layers, place.grouped, place.backend)
"""


def half(folder: Path) -> Path:
    """The core without its torch part: what its import raises is no ImportError."""
    package = folder / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise FileNotFoundError('no libtransformer_engine.so')\n")
    return folder


@pytest.mark.parametrize(
    ("impl", "gpu", "layers"),
    [
        ("auto", True, "te"),
        ("auto", False, "local"),
        ("transformer_engine", True, "te"),
        ("local", True, "local"),
        ("local", False, "local"),
    ],
)
def test_layers_follow_the_setting(impl: str, gpu: bool, layers: str) -> None:
    config = load_config("quickstart", ["cluster=gpu1", f"trainer.transformer_impl={impl}"])
    assert layers_of(config.trainer.transformer_impl, gpu=gpu) == layers
    assert training_of(config, gpu=gpu).layers == layers


def test_a_missing_transformer_engine_is_refused_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(ConfigError, match=REMEDY):
        need_transformer_engine("auto")


def test_a_half_installed_one_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    monkeypatch.syspath_prepend(half(tmp_path))
    with pytest.raises(ConfigError, match=f"FileNotFoundError: no libtransformer.*{REMEDY[-30:]}"):
        need_transformer_engine("auto")


def test_a_whole_one_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transformer_engine" / "pytorch").mkdir(parents=True)
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    need_transformer_engine("transformer_engine")
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.delitem(sys.modules, name)


def test_local_layers_on_cuda_do_not_meet_a_half_installed_one(tmp_path: Path) -> None:
    """Before `prepare` its import ends with an error that megatron-core does not expect."""
    done = run_code(ON_CUDA, str(half(tmp_path)))
    assert done.returncode == 0, done.stderr[-2000:]
    said = done.stdout.split()
    assert said == ["FileNotFoundError", "ModuleNotFoundError", "local", "True", "nccl"]


def test_a_cpu_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"transformer_impl = 'transformer_engine' .*use auto"):
        prepare("cpu", impl="transformer_engine")


@pytest.mark.parametrize(("ep", "dtype", "more"), [(1, "bf16", 2), (8, "bf16", 2), (1, "fp32", 0)])
def test_a_dry_run_counts_stacked_experts(ep: int, dtype: str, more: int) -> None:
    """Of one layer, stacked, and their gradients; in fp32 experts are called one by one."""
    spec = model_spec(model_shapes(load_config("qwen3-30b-a3b")))
    sizes, training = ParallelConfig(dp=8, ep=ep), Training(dtype=dtype)
    (te,) = trainer_memory(spec, sizes, training)
    (local,) = trainer_memory(spec, sizes, replace(training, layers="local"))
    stack = 2 * (2 * 768) * 2048 * 128 // ep  # bytes of the first weights of 128 experts
    assert local.activations - te.activations == more * stack
    assert (local.weights, local.gradients) == (te.weights, te.gradients)
