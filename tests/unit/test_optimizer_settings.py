"""`trainer.ddp`, `trainer.optimizer_args`: which fields of megatron-core may be set."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest

from moerl.config import optimizer_settings
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
