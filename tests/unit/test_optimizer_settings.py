"""`trainer.ddp`, `trainer.optimizer_args`: which fields of megatron-core may be set."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest

from moerl.config import load_config, optimizer_settings, resolve
from moerl.config.checks import check
from moerl.config.optimizer_settings import (
    DDP_REFUSED,
    OPTIMIZER_REFUSED,
    check_optimizer_settings,
    ddp_args,
    installed_fields,
    optimizer_args,
    refusal,
)
from moerl.config.schema import OptimizerConfig, ParallelConfig, TrainerConfig
from moerl.core.errors import ConfigError


def test_each_refusal_names_fields_of_the_installed_megatron_core() -> None:
    ddp = installed_fields(
        "distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"
    )
    optimizer = installed_fields("optimizer/optimizer_config.py", "OptimizerConfig")
    assert len(ddp) > 30
    assert len(optimizer) > 50
    for fields, refused in ((ddp, DDP_REFUSED), (optimizer, OPTIMIZER_REFUSED)):
        for pattern in " ".join(refused).split():
            assert any(fnmatchcase(name, pattern) for name in fields), pattern
    free = {name for name in ddp if not refusal(name, DDP_REFUSED)}
    assert free == {
        "overlap_grad_reduce",
        "overlap_param_gather",
        "bucket_size",
        "pad_buckets_for_high_nccl_busbw",
    }
    assert "exp_avg_dtype" in {name for name in optimizer if not refusal(name, OPTIMIZER_REFUSED)}


def test_without_megatron_core_refusals_hold_and_a_rank_compares_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(optimizer_settings, "installed_fields", lambda *_: {})
    check_optimizer_settings(trainer(optimizer_args={"optimizer_cpu_offloads": True}))
    with pytest.raises(ConfigError, match="Adam is the only optimizer"):
        check_optimizer_settings(trainer(optimizer_args={"optimizer": "muon"}))


GPU = ["cluster=gpu1", "trainer.optimizer.distributed=true"]
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
