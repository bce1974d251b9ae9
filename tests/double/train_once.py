"""One training of a tiny MoE with both replays, the same on the double and on the CPU.

python -m tests.double.train_once FOLDER      on the CPU: make the model, train, keep the numbers
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from moerl.config.schema import (
    Config,
    ModelConfig,
    OptimizerConfig,
    ReplayConfig,
    TinyModel,
    TrainerConfig,
)
from moerl.core.types import BatchPlan
from moerl.layout import LayerSpec
from moerl.records.blob_store import BlobStore
from moerl.trainer.model import platform
from tests.helpers.patience import patience

if TYPE_CHECKING:
    from moerl.trainer.learner.step import Learner

MODEL, REFERENCE, TEACHER, NUMBERS = "model", "reference", "teacher", "numbers.pt"
Tensors = dict[str, torch.Tensor]
Numbers = dict[str, Any]  # by name: tensors by name, or metrics
# Forward passes are equal bitwise.  In backward passes torch has other formulas for CUDA (in fp32:
# 7.3e-7 of a tensor's largest gradient measured), and Adam divides by gradients near zero (4.2e-5
# of its largest weight).
BOUNDS = {"gradients": 3e-6, "weights": 2e-4}
FROM_GRADIENTS = ("loss/grad_norm", "loss/grad_norm_router", "critic/grad_norm")


@dataclass(frozen=True)
class Trained:
    """A learner and what it is trained with."""

    learner: Learner
    plan: BatchPlan

    def gradients(self) -> Tensors:
        """Of the plan, by name of the parameter."""
        self.learner.gradients(self.plan)
        return self.current_gradients()

    def current_gradients(self) -> Tensors:
        """Of the last plan."""
        named = self.learner.model.gpt.named_parameters()
        return {name: parameter.main_grad.cpu().clone() for name, parameter in named}

    def weights(self) -> Tensors:
        named = self.learner.model.gpt.named_parameters()
        return {name: parameter.detach().cpu().clone() for name, parameter in named}


PLAIN = TrainerConfig(optimizer=OptimizerConfig(lr=1e-3))


def prepare(
    where: str,
    folder: Path,
    replayed: ReplayConfig = ReplayConfig(),
    layers: LayerSpec = "local",
    *,
    trainer: TrainerConfig = PLAIN,
) -> Trained:
    """Load the model of the folder and plan a batch of random records."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    place = platform.prepare(where, impl="local" if layers == "local" else "auto")
    from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf
    from moerl.trainer.learner.step import Learner
    from moerl.trainer.model import gpt, parallel
    from tests.helpers.trainer_support import make_plan

    vars(parallel)["rank_store"] = lambda _timeout: dist.HashStore()  # the only rank
    config = Config(
        model=ModelConfig(path=str(folder / MODEL)),
        trainer=trainer,
        replay=replayed,
    )
    ranks = parallel.start(config.trainer.parallel, place, timeout_s=patience(60))
    store = BlobStore(folder / f"blobs-{where}", "n0")
    plan = make_plan(store, groups=4, max_tokens=48)
    source = HfFolder(str(folder / MODEL))
    model = gpt.build(source.spec, config.trainer, ranks, with_replay=True)
    load_hf(model.tensors, model.tiles, source)
    return Trained(Learner(model, ranks, config, store), plan)


def numbers(trained: Trained) -> Numbers:
    """Gradients of the batch, then its metrics and the weights after its step."""
    gradients = trained.gradients()
    metrics = trained.learner.step(trained.plan)
    return {
        "gradients": gradients,
        "metrics": without_times(metrics),
        "weights": trained.weights(),
    }


def without_times(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def another(first: Trained, config: Config, *, with_critic: bool = False) -> Trained:
    """A learner of the same model in the same groups, before its first step."""
    from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf
    from moerl.trainer.learner.critic import Critic
    from moerl.trainer.learner.step import Learner
    from moerl.trainer.model import gpt

    parallel, store = first.learner.parallel, first.learner.store
    source = HfFolder(config.model.path)
    model = gpt.build(source.spec, config.trainer, parallel, with_replay=True, lora=config.lora)
    load_hf(model.tensors, model.tiles, source)
    model.keep_base()
    critic = Critic(config, parallel, store) if with_critic else None
    return Trained(Learner(model, parallel, config, store, critic), first.plan)


def small_plan(trained: Trained, max_tokens: int = 1 << 12, groups: int = 1) -> BatchPlan:
    """One microbatch of some of the records, or more of fewer tokens."""
    from moerl.data.batching import plan_batch

    plan = trained.plan
    some = plan.groups[:groups]
    return plan_batch(
        plan.step, plan.version, some, dp_size=1, max_tokens_per_microbatch=max_tokens
    )


def largest_difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """Over all tensors, relative to the largest number of each; NaN if one is not a number."""
    assert one.keys() == other.keys()
    found = [
        float((one[name] - other[name]).abs().max() / other[name].abs().max().clamp(min=1e-9))
        for name in one
    ]
    return float(torch.tensor(found).max())  # Python's max would pass over NaN


def other_metrics(one: Mapping[str, float], other: Mapping[str, float]) -> list[str]:
    """Names of metrics that differ: those of a forward pass bitwise, norms of gradients by 1e-6."""
    assert one.keys() == other.keys()
    bounds = {name: 1e-6 * abs(other[name]) for name in FROM_GRADIENTS if name in other}
    return [name for name in one if abs(one[name] - other[name]) > bounds.get(name, 0.0)]


def make_folder(folder: Path) -> None:
    """With the model that `prepare` loads, and a reference and a teacher for it."""
    from moerl.data.tiny_model import make_tiny_model
    from tests.helpers.trainer_support import EXPERTS, LAYERS, TOP_K

    shape = TinyModel(enabled=True, num_layers=LAYERS, num_experts=EXPERTS, experts_per_token=TOP_K)
    for seed, name in enumerate((MODEL, REFERENCE, TEACHER)):
        make_tiny_model(folder / name, shape, seed=seed)


def main() -> None:
    from tests.double import attention, other_models

    folder = Path(sys.argv[1])
    make_folder(folder)
    attention.replace(everywhere=True)  # in the form that the double has
    first = prepare("cpu", folder)
    found = numbers(first)
    found["ref models"] = other_models.ref_numbers(other_models.with_ref_models(first, folder))
    found["critic"] = other_models.critic_numbers(other_models.with_critic(first))
    found["audit"] = other_models.audit(first, folder)
    found["settings"] = {
        name: numbers(other_models.with_setting(first, name)) for name in other_models.SETTINGS
    }
    found["probe"] = other_models.probed(other_models.with_setting(first, "recompute"))
    torch.save(found, folder / NUMBERS)


if __name__ == "__main__":
    main()
