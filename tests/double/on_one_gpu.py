"""One GPU for engine and trainer: a step and two publishes of each recipe, scaled down.

Settings are the recipe's; the model has its family, with the sizes of the records.  The engine is
its end of a publish: live weights on the GPU of the trainer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from moerl.config import Config, load_config, resolve
from moerl.config.checks import check
from moerl.config.clusters import placement, trainer_share
from moerl.core.types import PolicyVersion
from moerl.layout import ModelSpec, model_spec
from moerl.planning.estimates import model_shapes
from moerl.planning.memory import trainer_memory, training_of
from moerl.records.blob_store import BlobStore
from moerl.trainer.model import platform
from tests.double.cuda_api import SHARES
from tests.double.watch import memory, purpose
from tests.helpers.device_publish import OneRank
from tests.helpers.patience import patience
from tests.helpers.trainer_support import EXPERTS, LAYERS, TOP_K, VOCAB, make_plan

if TYPE_CHECKING:
    from moerl.trainer.learner.step import Learner
    from moerl.trainer.model.parallel import Parallel

RECIPES = {"quickstart": ["cluster=gpu1"], "smollm2-moe": ["cluster=gpu1"], "olmoe-1gpu": []}
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_experts_per_tok": TOP_K,
}
EXPERT_SIZES = ("num_experts", "num_local_experts")  # by family
WIDTHS = ("intermediate_size", "moe_intermediate_size")


@dataclass
class OneGpu:
    """A trainer and the end of an engine on it."""

    name: str
    config: Config
    spec: ModelSpec
    learner: Learner
    engine: OneRank

    def publish(self, step: int) -> list[str]:
        """Names of engine weights that are not the trainer's afterwards."""
        self.engine.snapshot.store(self.learner.model.tensors, PolicyVersion(0, step))
        with purpose(f"engine of {self.name}"):
            self.engine.publish()
        with purpose("comparison"):
            return self.engine.differing(self.learner.model.tensors)


def configured(name: str) -> Config:
    config = resolve(load_config(name, RECIPES[name]))
    check(config, starts=False)
    placed = placement(config)
    assert placed.engines[0].devices == placed.trainers[0].devices == (0,)
    return config


def small_spec(config: Config) -> ModelSpec:
    """The recipe's family in the sizes of the records."""
    shapes = model_shapes(config)
    is_grouped = shapes["num_key_value_heads"] < shapes["num_attention_heads"]
    small = SMALL | {"head_dim": 16, "num_key_value_heads": 2 if is_grouped else 4}
    small |= {name: EXPERTS for name in EXPERT_SIZES if name in shapes}
    small |= {name: 48 for name in WIDTHS if name in shapes}
    return model_spec(shapes | small)


@pytest.fixture(scope="module")
def ranks() -> Parallel:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    config = configured("olmoe-1gpu")
    place = platform.prepare("cuda", impl="local", share=trainer_share(config))
    import torch.distributed as dist

    from moerl.trainer.model import parallel

    vars(parallel)["rank_store"] = lambda _timeout: dist.HashStore()  # the only rank
    return parallel.start(config.trainer.parallel, place, timeout_s=patience(60))


def started(name: str, ranks: Parallel, folder: Path, title: str = "") -> OneGpu:
    """title: by which bytes are booked; else the recipe's name."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from moerl.trainer.learner.step import Learner
    from moerl.trainer.model import gpt

    config = configured(name)
    spec = small_spec(config)
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0)  # Megatron's own, of weights
    title = title or name
    with purpose(f"trainer of {title}"):
        model = gpt.build(spec, config.trainer, ranks, with_replay=True, lora=config.lora)
        model.keep_base()
        learner = Learner(model, ranks, config, BlobStore(folder / name, "n0"))
    with purpose(f"engine of {title}"):
        engine = OneRank(spec, "shm")
    return OneGpu(title, config, spec, learner, engine)


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_and_a_publish_on_one_gpu(name: str, ranks: Parallel, tmp_path: Path) -> None:
    """Weights arrive, bytes by purpose are the plan's, and nothing is on another GPU."""
    both = started(name, ranks, tmp_path)
    learner = both.learner
    plan = make_plan(learner.store, max_tokens=48)
    assert both.publish(0) == []
    with purpose(f"trainer of {name}"):
        metrics = learner.step(plan)
    assert metrics["routing/replay_cover_frac"] == metrics["keep/cover_frac"] == 1.0
    assert both.engine.differing(learner.model.tensors), "control: a step moves the weights"
    assert both.publish(1) == []
    learner.optimizer.zero_grad()
    training = training_of(both.config, gpu=True)
    (told,) = trainer_memory(both.spec, both.config.trainer.parallel, training)
    trainer, engine = (memory(f"{side} of {name}").live for side in ("trainer", "engine"))
    print(f"{name}: trainer {trainer}, plan {told.static + told.device_base}; engine {engine}")
    assert trainer == pytest.approx(told.static + told.device_base, rel=0.05)
    served = sum(t.nbytes for t in both.engine.served.tensors().values())
    buckets = 2 * min(served, both.config.sync.bucket_bytes)  # all of it is one bucket
    assert engine == pytest.approx(served + buckets, rel=0.05)
    assert memory(device=1).live == 0
    both.engine.close()


def test_torch_enforces_the_share_of_the_trainer(ranks: Parallel) -> None:
    assert ranks.device.type == "cuda"
    assert {0: pytest.approx(0.5)} == SHARES
