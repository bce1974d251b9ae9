"""Values of reward models on the reference ranks are those of transformers, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moerl.config.load import save_config
from moerl.config.reward_terms import RewardTerm
from moerl.config.schema import (
    Config,
    ModelConfig,
    ParallelConfig,
    RefModelsConfig,
    TaskConfig,
    TrainerConfig,
)
from moerl.core.messages import ValueRow, ValueRows
from moerl.core.types import Array
from moerl.records.blob_store import BlobStore
from moerl.runtime.run_dir import RunDir
from tests.helpers.fake_controller import FakeController, run_gang
from tests.helpers.trainer_support import VOCAB, make_model

GATE = 1e-5  # fp32
LAYOUTS = {
    "one": ParallelConfig(),
    "tensor": ParallelConfig(tp=2, etp=2),
    "stages": ParallelConfig(pp=2),
    "data": ParallelConfig(dp=2, ep=2),
    "context": ParallelConfig(cp=2, ep=2),
}


def value_model(folder: Path, base: Path, kind: str, seed: int) -> Path:
    """A folder that transformers wrote, with a random head.  kind: as its classes end."""
    import transformers

    torch.manual_seed(seed)
    made: Any = getattr(transformers, f"Qwen3MoeFor{kind}")
    model = made.from_pretrained(base, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        for part in model.score.parameters():
            part.normal_(0, 0.3)
    if seed % 2:
        model.config.problem_type = "multi_label_classification"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("values")
    base = make_model(root / "policy")
    kinds = ("TokenClassification", "SequenceClassification")
    return [base, *(value_model(root / kind, base, kind, n) for n, kind in enumerate(kinds, 1))]


ROWS = [
    ValueRow(np.random.default_rng(n).integers(0, VOCAB, length).astype(np.int32), ends)
    for n, (length, ends) in enumerate([(40, (3, 17, 40)), (9, (9,)), (1, (1,)), (23, (1, 22, 23))])
]


def served(root: Path, models: list[Path], layout: ParallelConfig) -> list[tuple[Array, ...]]:
    """Values of the rows by both models, from reference ranks of this layout."""
    base, *others = map(str, models)
    run = RunDir(root / "run")
    run.create()
    terms = [RewardTerm(f"m{n}", where="model", model=one) for n, one in enumerate(others)]
    config = Config(
        model=ModelConfig(path=base),
        task=TaskConfig(rewards=terms),
        trainer=TrainerConfig(step_timeout_s=60.0, max_tokens_per_microbatch=64),
        ref_models=RefModelsConfig(placement="separate", parallel=layout),
    )
    save_config(config, run.config)
    store = BlobStore(root / "blobs", "n0")
    controller = FakeController(lambda step: None)
    controller.records = [ValueRows(n, one, tuple(ROWS)) for n, one in enumerate(others)]
    done = run_gang(controller, run, store, layout.world_size, "--ref-models")
    assert done.returncode == 0, done.stderr[-4000:]
    assert [one.number for one in controller.values] == [0, 1]
    return [one.values for one in controller.values]


def oracle(folder: Path, kind: str, row: ValueRow, end: int) -> float:
    """What transformers gives the first `end` tokens."""
    import transformers

    made: Any = getattr(transformers, f"Qwen3MoeFor{kind}")
    model = made.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(row.token_ids[:end].astype(np.int64))[None]
    with torch.no_grad():
        logits = model(ids).logits
    value = logits[0, -1, 0] if kind == "TokenClassification" else logits[0, 0]
    is_logit = model.config.problem_type == "multi_label_classification"
    return float(value.sigmoid() if is_logit else value)


def check(root: Path, models: list[Path], layout: ParallelConfig) -> None:
    by_token, by_sequence = served(root, models, layout)
    kinds = ("TokenClassification", "SequenceClassification")
    for folder, kind, found in zip(models[1:], kinds, (by_token, by_sequence), strict=True):
        for row, values in zip(ROWS, found, strict=True):
            assert values.dtype == np.float32
            for end, value in zip(row.ends, values, strict=True):
                assert abs(value - oracle(folder, kind, row, end)) <= GATE, (kind, end)
    gaps = [abs(a - b).max() for a, b in zip(by_token, by_sequence, strict=True)]
    assert max(gaps) > 1000 * GATE, "control: another head gives other values"
    long, last = ROWS[0], float(by_token[0][-1])
    near = oracle(models[1], "TokenClassification", long, long.ends[-1] - 1)
    assert abs(near - last) > 100 * GATE, "control: a token earlier the value is another"
    assert 0 < by_token[0].min() <= by_token[0].max() < 1, "probabilities"


@pytest.mark.parametrize("name", ["one", "tensor"])
def test_values_are_those_of_transformers(name: str, tmp_path: Path, models: list[Path]) -> None:
    check(tmp_path, models, LAYOUTS[name])


@pytest.mark.full
@pytest.mark.parametrize("name", ["stages", "data", "context"])
def test_every_layout_gives_them(name: str, tmp_path: Path, models: list[Path]) -> None:
    check(tmp_path, models, LAYOUTS[name])
