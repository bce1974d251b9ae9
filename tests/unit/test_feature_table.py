"""The support table: every row is refused or proven by a test that exists, and the docs say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moerl.config.schema import EngineConfig, ReplayConfig
from moerl.core.errors import ConfigError
from moerl.core.types import GenerateRequest, ModelShape, SamplingParams
from moerl.engine import feature_table
from moerl.engine.feature_table import FEATURES, Verdict
from moerl.engine.host import server_args
from moerl.engine.host.host import EngineContext, EngineHost
from moerl.records.blob_store import BlobStore
from moerl.runtime.run_dir import RunDir
from tests.helpers import family_table

REPO = Path(__file__).parents[2]
ROWS = [
    (feature.name, name, allowed, feature.verdict)
    for feature in FEATURES
    for name, allowed in feature.args.items()
]


def other(allowed: tuple[Any, ...]) -> Any:
    """A value that the row does not allow."""
    first = allowed[0]
    if isinstance(first, bool):
        return not first
    if isinstance(first, int):
        return first + 1
    return "something-else"


def built(name: str, value: Any, *, routing: bool) -> dict[str, Any]:
    config = EngineConfig(platform="cpu", args={name: value})
    return server_args.server_args(
        config, Path("model"), routing=routing, version="0.3", port=1, nccl_port=2
    )


@pytest.mark.parametrize(("feature", "name", "allowed", "verdict"), ROWS, ids=[r[1] for r in ROWS])
def test_row(feature: str, name: str, allowed: tuple[Any, ...], verdict: Verdict) -> None:
    assert name in server_args.field_names(), "SGLang has no such argument"
    with pytest.raises(ConfigError) as error:
        built(name, other(allowed), routing=True)
    text = str(error.value)
    assert f"engine.args.{name} = {other(allowed)!r}" in text
    assert feature in text
    assert "\n" not in text
    for value in allowed:
        assert built(name, value, routing=True)[name] == value
    if verdict is not Verdict.NEVER:
        assert built(name, other(allowed), routing=False)[name] == other(allowed)
    else:
        with pytest.raises(ConfigError):
            built(name, other(allowed), routing=False)


def test_what_sglang_does_on_cuda_unasked_has_a_row() -> None:
    """Its defaults and choices there that the tests on a CPU never meet."""
    unasked = {"cuda_graph_backend_decode", "cuda_graph_backend_prefill", "attention_backend"}
    unasked |= {"sampling_backend", "enable_torch_compile"}
    assert unasked <= {name for _, name, _, _ in ROWS}
    assert "fused top-k kernels" in {feature.name for feature in FEATURES}


def test_no_argument_has_two_rows() -> None:
    names = [name for _, name, _, _ in ROWS]
    assert len(names) == len(set(names))


def test_proofs_exist() -> None:
    for feature in FEATURES:
        if feature.verdict is Verdict.PROVEN:
            assert feature.proof, feature.name
            assert not feature.args, "a proven feature needs no refusal"
        if feature.verdict is Verdict.NOT_RUN:
            assert feature.proof.startswith("tests/gpu/"), f"{feature.name}: nothing compares it"
        if feature.proof:
            path, _, name = feature.proof.partition("::")
            assert f"def {name}(" in (REPO / path).read_text(), feature.proof
        else:
            assert feature.args, f"{feature.name} is refused by nothing"


def test_docs_are_made_from_the_table() -> None:
    assert (REPO / "docs" / "replay-support.md").read_text() == family_table.page()


@pytest.mark.parametrize("name", feature_table.ENVIRONMENT)
def test_environment_that_changes_reports_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "0")
    assert built("chunked_prefill_size", 64, routing=False)
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=name):
        built("chunked_prefill_size", 64, routing=False)


def test_requests_carry_nothing_that_is_not_recorded(tmp_path: Path) -> None:
    """Every parameter that shapes a distribution is sent, neutral if no sampling mask tells of
    it.
    """
    shape = ModelShape(vocab_size=50, num_layers=2, moe_layers=(0, 1), num_experts=4, top_k=2)
    context = EngineContext(tmp_path, shape, ReplayConfig(), RunDir(tmp_path), "t")
    host = EngineHost(0, EngineConfig(), context, BlobStore(tmp_path, "n"))
    sampling = SamplingParams(4, temperature=0.7, top_p=0.9, top_k=20)
    ask = GenerateRequest("a", 0, np.array([5, 6], np.int32), 0, sampling)
    body = host._generation._body([ask], ["a"])
    assert set(body["sampling_params"][0]) == {
        "n", "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p",
        "frequency_penalty", "presence_penalty", "repetition_penalty", "stop_token_ids",
        "ignore_eos", "skip_special_tokens",
    }  # fmt: skip
    neutral = {"n": 1, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    assert neutral.items() <= body["sampling_params"][0].items()
    text = json.dumps(sorted(body))
    for word in ("logit", "processor", "regex", "schema", "ebnf", "beam", "lora"):
        assert word not in text
