"""Worker of test_lora_reference: the reference of a run with adapters, a second model, and a
teacher that is a version of the adapters.

lora_reference_ranks.py --model DIR --work DIR --sizes JSON [--lora JSON] [--dtype bf16]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from moerl.trainer.model import platform

PLACE = platform.prepare("cpu")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from moerl.config.lora_settings import LoraConfig  # noqa: E402
from moerl.config.schema import (  # noqa: E402
    AlgorithmConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainerConfig,
)
from moerl.core.types import BatchPlan, PolicyVersion  # noqa: E402
from moerl.data.batching import split_plan  # noqa: E402
from moerl.records.blob_store import BlobStore  # noqa: E402
from moerl.trainer.hf_io.adapter_files import save_adapter  # noqa: E402
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf  # noqa: E402
from moerl.trainer.hf_io.teacher_folder import factors_digest, publish_teacher  # noqa: E402
from moerl.trainer.learner.ref_model import BorrowedPolicy, RefModel  # noqa: E402
from moerl.trainer.learner.step import Learner  # noqa: E402
from moerl.trainer.model import parallel  # noqa: E402
from moerl.trainer.model.gpt import build  # noqa: E402
from moerl.trainer.model.replay import Mode  # noqa: E402
from moerl.trainer.passes.schedule import Batches, score  # noqa: E402
from tests.helpers.lora_oracle import random_factors  # noqa: E402
from tests.helpers.patience import patience  # noqa: E402
from tests.helpers.trainer_support import make_plan  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--work", "--sizes"):
        parser.add_argument(name, required=True)
    parser.add_argument("--lora", default="{}")
    parser.add_argument("--dtype", default="fp32")
    options = parser.parse_args()
    sizes = ParallelConfig(**json.loads(options.sizes))
    ranks = parallel.start(sizes, PLACE, timeout_s=patience(60))
    store = BlobStore(Path(options.work) / f"blobs{dist.get_rank()}", "n0")
    plan = make_plan(store, groups=4, dp_size=sizes.dp)
    lora = LoraConfig(**json.loads(options.lora))
    own = make_learner(options.model, "", ranks, store, lora, options.dtype)
    second = make_learner(options.model, options.model, ranks, store, lora, options.dtype)
    before = {name: tensor.clone() for name, tensor in own.model.tensors.items()}
    waited: list[bool] = []
    own.before_update = lambda: waited.append(True)
    scores, wanted, adapted = reference(own, plan), reference(second, plan), unscored(own, plan)
    found = {
        "loaded": [list(own.ref_models), list(second.ref_models)],
        "gap": largest(worst(scores, wanted)),
        "adapters_on": largest(worst(adapted, wanted)),
        "restored": all_ranks(
            all(torch.equal(before[name], t) for name, t in own.model.tensors.items())
        ),
        "waited": len(waited),
        "teacher": teacher(own, plan, Path(options.work) / "0.3"),
        "steps": [[own.step(plan), second.step(plan)] for _ in range(2)],
    }
    if ranks.is_first:
        print("FOUND", json.dumps(found))
    dist.barrier()


def make_learner(
    folder: str,
    reference: str,
    ranks: parallel.Parallel,
    store: BlobStore,
    lora: LoraConfig,
    dtype: str,
) -> Learner:
    config = Config(
        model=ModelConfig(path=folder),
        trainer=TrainerConfig(
            parallel=ranks.sizes,
            minibatches=2,
            optimizer=OptimizerConfig(lr=0.01, min_lr=0.01),
            dtype=dtype,
        ),
        algorithm=AlgorithmConfig(
            advantage="none", kl="unbiased", kl_coef=0.5, reference=reference
        ),
        lora=lora,
    )
    source = HfFolder(folder)
    model = build(source.spec, config.trainer, ranks, with_replay=True, lora=config.lora)
    load_hf(model.tensors, model.tiles, source)
    model.keep_base()
    learner = Learner(model, ranks, config, store)
    for adapters in model.adapters:
        adapters.set_factors(random_factors(Path(folder), config.lora))
    learner.optimizer.reload_model_params()
    return learner


def reference(learner: Learner, plan: BatchPlan) -> list[dict[int, Tensor]]:
    """Scores of the reference, by minibatch and microbatch, as a step has them."""
    parts = split_plan(plan, learner.config.trainer, seed=learner.config.run.seed)
    return [known.logprobs["reference"] for known in learner._score_without_grad(plan, parts)]


def unscored(learner: Learner, plan: BatchPlan) -> list[dict[int, Tensor]]:
    """The control: adapters stay on."""
    parts = split_plan(plan, learner.config.trainer, seed=learner.config.run.seed)
    return [
        score(
            learner.model,
            Batches(part.plan, learner.config, learner.parallel, learner.store),
            Mode.OFF,
        )
        for part in parts
    ]


def teacher(learner: Learner, plan: BatchPlan, folder: Path) -> dict[str, float]:
    """Gaps to the scores of the model when it had the teacher's adapters, which it has no more."""
    model, config, ranks = learner.model, learner.config, learner.parallel
    whole = random_factors(Path(config.model.path), config.lora)
    truth = unscored(learner, plan)
    digest = factors_digest(model.factors(), model.spec, config.lora, ranks.sizes, ranks.control)
    if ranks.is_first:
        fresh = folder.with_name(".fresh")
        save_adapter(fresh, whole, model.spec, config.lora, config.model.path)
        publish_teacher(fresh, folder, digest)
    dist.barrier()
    model.set_factors({name: 0.5 * factor for name, factor in whole.items()})
    before = {name: tensor.clone() for name, tensor in model.tensors.items()}
    borrowed = BorrowedPolicy(model, config, ranks, lambda: None)
    vocabulary, folder_of_base = model.spec.vocab_size, config.model.path
    apart = RefModel("teacher", folder_of_base, vocabulary, config, ranks, follows=True)
    for policy in (borrowed, apart):
        policy.take(PolicyVersion(0, 3), folder)
    parts = split_plan(plan, config.trainer, seed=config.run.seed)
    read = [Batches(part.plan, config, ranks, learner.store) for part in parts]
    found = {
        "borrowed": worst(
            borrowed.each(read, lambda model, batches: score(model, batches, Mode.OFF)), truth
        ),
        "apart": worst([apart.logprobs(batches) for batches in read], truth),
        "control": worst(unscored(learner, plan), truth),
        "moved": float(any(not torch.equal(before[n], t) for n, t in model.tensors.items())),
    }
    model.set_factors(whole)
    return {name: largest(value) for name, value in found.items()}


def worst(one: list[dict[int, Tensor]], other: list[dict[int, Tensor]]) -> float:
    gaps = [0.0]
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        gaps += [float((mine[n] - theirs[n]).abs().max()) for n in mine if len(mine[n])]
    return max(gaps)


def largest(value: float) -> float:
    every = torch.tensor(value)
    dist.all_reduce(every, op=dist.ReduceOp.MAX)
    return float(every)


def all_ranks(holds: bool) -> bool:
    return largest(float(not holds)) == 0.0


if __name__ == "__main__":
    main()
