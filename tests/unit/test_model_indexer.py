"""Stand-ins for sparse attention on a plain CPU against loops, and what settings it allows."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moerl.config.checks import sparse_attention
from moerl.config.rules import refuse
from moerl.config.schema import Config, EngineConfig, ReplayConfig, RolloutConfig
from moerl.core.errors import ConfigError
from moerl.engine.host.server_args import arguments
from moerl.engine.plugin import in_flight
from moerl_cpu_sglang import lightning_indexer


def test_best_positions_are_those_of_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys = (torch.randn(*shape, generator=generator) for shape in ((3, 5, 4), (8, 4)))
    weight = torch.randn(3, 5, generator=generator)
    found = lightning_indexer.best_positions(query, keys, weight, 6)
    for token, chosen in enumerate(found.tolist()):
        own = len(keys) - len(query) + token
        scores = [
            sum(
                float(weight[token, head]) * max(0.0, float(query[token, head] @ keys[at]))
                for head in range(5)
            )
            for at in range(own + 1)
        ]
        best = sorted(range(own + 1), key=lambda at: -scores[at])[:6]
        assert set(chosen) - {-1} == set(best)
        assert chosen.count(-1) == 6 - len(best)


def test_attention_reads_the_chosen_positions() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(*s, generator=generator) for s in ((2, 3, 4), (6, 4), (6, 5)))
    chosen = torch.tensor([[4, 0, -1], [5, 2, 1]], dtype=torch.int32)
    found = lightning_indexer.attend(q, k, v, chosen, 0.5)
    for token, at in enumerate(([4, 0], [5, 2, 1])):
        weights = (q[token] @ k[at].T * 0.5).softmax(-1)
        torch.testing.assert_close(found[token], weights @ v[at])
    every = lightning_indexer.attend(q, k, v, torch.arange(6).expand(2, 6), 0.5)
    assert float((found - every).abs().max()) > 0.1, "control: another choice"
    assert math.isfinite(float(found.sum()))


def test_only_the_models_are_told_of_sparse_attention() -> None:
    def ask(module: str) -> bool:
        scope = {"__name__": module, "ask": lightning_indexer.in_models_only}
        exec("def asks(original): return ask(original, None)", scope)
        told: bool = scope["asks"](lambda _config: True)
        return told

    assert ask("sglang.srt.models.deepseek_v2")
    assert ask("sglang.srt.configs.model_config")
    assert not ask("sglang.srt.server_args")


def test_the_server_of_a_sparse_model_records_positions() -> None:
    def args(model_type: str, *, routing: bool) -> dict[str, object]:
        return arguments(
            EngineConfig(),
            Path("model"),
            routing=routing,
            version="0.0",
            port=1,
            nccl_port=2,
            cuda=False,
            model_type=model_type,
        )

    assert args("deepseek_v32", routing=True)["enable_return_indexer_topk"] is True
    for model_type, routing in (("deepseek_v32", False), ("deepseek_v3", True)):
        assert "enable_return_indexer_topk" not in args(model_type, routing=routing)


@pytest.mark.parametrize("row", [None, 1, 4])
def test_positions_chosen_twice_are_refused_where_they_differ(
    row: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of 6 rows is retracted after 5; `row` chooses otherwise in the second prefill."""
    first = torch.tensor([[[0, 1, 2]], [[0, 1, 2]], [[0, 1, 2]], [[1, 3, 0]], [[4, 2, 1]]])
    second = torch.cat([first.flip(-1), torch.tensor([[[5, 0, 1]]])])
    if row is not None:
        second[row] = torch.tensor([[3, 0, 1]])
    capturer = SimpleNamespace(get_topk=lambda seqlen, **_: first[: seqlen - 1])
    module = SimpleNamespace(get_global_indexer_capturer=lambda: capturer)
    monkeypatch.setitem(sys.modules, "sglang.srt.state_capturer.indexer_topk", module)
    req: Any = SimpleNamespace(
        return_indexer_topk=True,
        indexer_topk=second,
        origin_input_ids=[7] * 4,
        output_ids=[7] * 2,
        kv=SimpleNamespace(req_pool_idx=0),
    )
    in_flight._keep_positions(req, None)
    in_flight.drop_positions(None, None, req)
    assert (req.indexer_topk is None) == (row == 4), "rows below top-k choose all positions"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(replay=ReplayConfig(routing="R2")), "replay.routing.*use R3 or off"),
        (Config(engine=EngineConfig(tp=2)), "engine.tp.*attention is not cut"),
        (
            Config(rollout=RolloutConfig(in_flight_mode="in_place")),
            "rollout.in_flight_mode.*use abort_resume",
        ),
    ],
)
def test_settings_without_a_record_are_refused(config: Config, message: str) -> None:
    good = Config(engine=EngineConfig(tp=2, args={"enable_dp_attention": True}))
    refuse(good, sparse_attention(good))
    with pytest.raises(ConfigError, match=message):
        refuse(config, sparse_attention(config))
