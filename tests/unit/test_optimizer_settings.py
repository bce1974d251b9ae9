"""`trainer.ddp`, `trainer.optimizer_args`: every field of megatron-core is allowed or refused."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moerl.config import load_config, resolve
from moerl.config.checks import check
from moerl.config.optimizer_settings import (
    DDP_FIELDS,
    DDP_REFUSED,
    OPTIMIZER_FIELDS,
    OPTIMIZER_REFUSED,
    Kind,
    ddp_args,
    optimizer_args,
)
from moerl.config.schema import OptimizerConfig, ParallelConfig, TrainerConfig
from moerl.core.errors import ConfigError


def installed(file: str, name: str) -> dict[str, str]:
    """Fields of a dataclass of megatron-core and their annotations, read without importing it."""
    found = importlib.util.find_spec("megatron")
    assert found is not None
    assert found.submodule_search_locations is not None
    path = Path(next(iter(found.submodule_search_locations))) / "core" / file
    (made,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    return {
        node.target.id: ast.unparse(node.annotation)
        for node in made.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def test_both_lists_are_the_fields_of_the_installed_megatron_core() -> None:
    ddp = installed(
        "distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"
    )
    optimizer = installed("optimizer/optimizer_config.py", "OptimizerConfig")
    for has, allowed, refused in (
        (ddp, DDP_FIELDS, DDP_REFUSED),
        (optimizer, OPTIMIZER_FIELDS, OPTIMIZER_REFUSED),
    ):
        assert not allowed.keys() & refused.keys()
        assert allowed.keys() | refused.keys() == has.keys()
        for name, kind in allowed.items():
            assert _word(kind) in has[name], name


def _word(kind: Kind) -> str:
    return "dtype" if isinstance(kind, tuple) else kind.__name__


GPU = ["trainer.platform=cuda", "trainer.dtype=bf16", "trainer.optimizer.distributed=true"]
OFFLOAD = "trainer.optimizer_args.optimizer_cpu_offload=true"
PRECISE = "trainer.optimizer_args.use_precision_aware_optimizer=true"
BAD = [
    (["trainer.ddp.overlap_grad_reduces=true"], "did you mean overlap_grad_reduce"),
    (["trainer.ddp.overlap_grad_reduce=1"], "overlap_grad_reduce = 1 .*a bool is needed"),
    (["trainer.ddp.average_in_collective=true"], "sums gradients in fp32.*remove it"),
    (["trainer.ddp.use_distributed_optimizer=true"], r"use trainer\.optimizer\.distributed"),
    ([*GPU, "trainer.ddp.bucket_size=0"], "bucket_size = 0 .*at least 1"),
    (["trainer.platform=cpu", "trainer.ddp.bucket_size=1000"], "overlap_grad_reduce=true"),
    (["trainer.ddp.overlap_param_gather=true"], r"trainer\.optimizer\.distributed=true"),
    (
        [*GPU, "trainer.ddp={overlap_grad_reduce: false, overlap_param_gather: true}"],
        "set both to true",
    ),
    (["trainer.optimizer_args.lr=1"], r"field of trainer\.optimizer; remove it"),
    (["trainer.optimizer_args.optimizer=muon"], "Adam is the only optimizer"),
    (["trainer.optimizer_args.optimizer_cpu_offloads=true"], "did you mean optimizer_cpu_offload"),
    ([OFFLOAD], r"trainer\.platform=cuda|trainer\.optimizer\.distributed"),
    (["trainer.platform=cpu", OFFLOAD], r"it needs trainer\.platform=cuda"),
    ([*GPU, "trainer.dtype=fp32", OFFLOAD], r"it needs trainer\.dtype=bf16"),
    (
        [*GPU, OFFLOAD, "trainer.optimizer_args.use_precision_aware_optimizer=false"],
        "it needs use_precision_aware_optimizer=true",
    ),
    (
        [*GPU, OFFLOAD, "trainer.optimizer_args.optimizer_offload_fraction=0.5"],
        "all is offloaded.*; remove it",
    ),
    ([*GPU, OFFLOAD, "trainer.optimizer_args.exp_avg_dtype=bf16"], "keeps fp32"),
    ([*GPU, "trainer.optimizer_args.pin_cpu_grads=false"], "optimizer_cpu_offload=true"),
    ([*GPU, "trainer.optimizer_args.exp_avg_dtype=bf16"], "needs use_precision_aware_optimizer"),
    ([*GPU, "trainer.optimizer_args.exp_avg_dtype=bf15"], "use fp32, bf16, fp16, fp8"),
    (["trainer.platform=cpu", PRECISE], "Transformer Engine"),
    ([*GPU, "trainer.optimizer_args.store_param_remainders=true"], "only the precision-aware"),
]


@pytest.mark.parametrize(("overrides", "says"), BAD, ids=lambda part: str(part)[-60:])
def test_what_megatron_core_would_refuse_later_is_refused_first(
    overrides: list[str], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        check(resolve(load_config("quickstart", overrides)))


GOOD = [
    ["trainer.ddp={overlap_grad_reduce: true, overlap_param_gather: true, bucket_size: 1000}"],
    [OFFLOAD],
    [OFFLOAD, "trainer.optimizer_args.overlap_cpu_optimizer_d2h_h2d=false"],
    [PRECISE, "trainer.optimizer_args={exp_avg_dtype: bf16, exp_avg_sq_dtype: bf16}"],
]


@pytest.mark.parametrize("overrides", GOOD, ids=str)
def test_what_is_allowed(overrides: list[str]) -> None:
    check(resolve(load_config("quickstart", [*GPU, *overrides])))


def trainer(**fields: Any) -> TrainerConfig:
    plain = TrainerConfig(
        parallel=ParallelConfig(dp=2), optimizer=OptimizerConfig(distributed=True)
    )
    return replace(plain, **fields)


def test_reduction_overlaps_where_it_costs_nothing() -> None:
    assert ddp_args(trainer(), cuda=True) == {"overlap_grad_reduce": True}
    assert ddp_args(trainer(ddp={"overlap_grad_reduce": False}), cuda=True) == {
        "overlap_grad_reduce": False
    }
    for other, cuda in (
        (trainer(), False),
        (trainer(parallel=ParallelConfig(tp=2)), True),
        (trainer(optimizer=OptimizerConfig()), True),
    ):
        assert not ddp_args(other, cuda=cuda)["overlap_grad_reduce"]


def test_offload_implies_what_megatron_needs_for_it() -> None:
    assert optimizer_args(trainer()) == {}
    asked = optimizer_args(trainer(optimizer_args={"optimizer_cpu_offload": True}))
    assert asked["use_precision_aware_optimizer"]
    assert asked["optimizer_offload_fraction"] == 1.0
