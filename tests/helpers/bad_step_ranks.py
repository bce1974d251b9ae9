"""Worker of test_bad_steps: two ranks whose steps are not finite; rank 0 prints what they did.

torchrun ... bad_step_ranks.py --model DIR --work DIR
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moerl.trainer.model import platform

PLACE = platform.prepare("cpu")

import torch  # noqa: E402

from moerl.config.schema import (  # noqa: E402
    AlgorithmConfig,
    Config,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ReplayConfig,
    TrainerConfig,
)
from moerl.core.errors import NonRetryableError, cause_of  # noqa: E402
from moerl.core.messages import BadStep  # noqa: E402
from moerl.core.types import BatchPlan  # noqa: E402
from moerl.data.batching import split_plan  # noqa: E402
from moerl.distributed.object_collectives import all_gather_values  # noqa: E402
from moerl.records.blob_store import BlobStore  # noqa: E402
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf  # noqa: E402
from moerl.trainer.learner.critic import Critic  # noqa: E402
from moerl.trainer.learner.step import Learner  # noqa: E402
from moerl.trainer.model import parallel  # noqa: E402
from moerl.trainer.model.gpt import build  # noqa: E402
from tests.helpers import bad_objective  # noqa: E402
from tests.helpers.patience import patience  # noqa: E402
from tests.helpers.trainer_support import OVERLAPPED, make_plan  # noqa: E402

OBJECTIVE = "tests.helpers.bad_objective:objective"


class Bench:
    def __init__(self, model: Path, work: Path) -> None:
        self.folder = HfFolder(str(model))
        sizes = ParallelConfig(dp=2, ep=2)
        self.ranks = parallel.start(sizes, PLACE, timeout_s=patience(60))
        self.store = BlobStore(work / f"blobs-{self.ranks.rank}", "n0")
        self.plans = [make_plan(self.store, groups=4, step=n, dp_size=2) for n in range(4)]
        self.bad: list[BadStep] = []

    def learner(self, limit: int = 1, **changes: Any) -> Learner:
        lora, distributed = changes.pop("lora", LoraConfig()), changes.pop("distributed", False)
        advantage = changes.pop("advantage", "grpo_mean")
        if distributed:
            changes |= {"ddp": OVERLAPPED, "dtype": "bf16"}
        config = Config(
            model=ModelConfig(path=str(self.folder.path)),
            trainer=TrainerConfig(
                parallel=ParallelConfig(dp=2, ep=2),
                optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0, distributed=distributed),
                skip_bad_steps=limit,
                **changes,
            ),
            lora=lora,
            replay=ReplayConfig(routing="R3"),
            algorithm=AlgorithmConfig(objective=OBJECTIVE, advantage=advantage),
        )
        model = build(self.folder.spec, config.trainer, self.ranks, with_replay=True, lora=lora)
        load_hf(model.tensors, model.tiles, self.folder)
        model.keep_base()
        critic = Critic(config, self.ranks, self.store) if advantage == "gae" else None
        learner = Learner(model, self.ranks, config, self.store, critic)
        self.bad = []
        learner.bad.report = self.bad.append
        return learner

    def arm(self, kind: str, rank: int = 1, number: int = 0, *, repeats: bool = True) -> None:
        """Rank `rank` alone meets the bad microbatch."""
        bad_objective.arm(kind if self.ranks.rank == rank else "", number, repeats=repeats)

    def everywhere(self, value: bool) -> bool:
        return all(all_gather_values(value, bool, self.ranks.control))


def state(learner: Learner) -> list[torch.Tensor]:
    """Weights, and the optimizer's moments and step counts."""
    found = [t.detach().clone() for t in learner.model.tensors.values()]
    found += [t.detach().clone() for t in learner.model.factors().values()]
    for chained in learner.optimizer.chained_optimizers:
        for values in chained.optimizer.state.values():
            found += [torch.as_tensor(v).detach().clone() for v in values.values()]
    return found


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def finite(learner: Learner) -> bool:
    return all(bool(t.isfinite().all()) for t in learner.model.tensors.values())


def ids_at(plan: BatchPlan, rank: int, microbatch: int) -> list[str]:
    pairs = zip(plan.rows, plan.rollouts(), strict=True)
    return [r.rollout_id for row, r in pairs if (row.dp_rank, row.microbatch) == (rank, microbatch)]


def skipped(bench: Bench, kind: str, number: int, **changes: Any) -> dict[str, Any]:
    """A good batch, a bad one, a good one; beside a run that never saw the bad one."""
    learner, other = bench.learner(**changes), bench.learner(**changes)
    learner.bad.report = bench.bad.append
    bench.arm("")
    first = learner.step(bench.plans[0])
    other.step(bench.plans[0])
    before = state(learner)
    bench.arm(kind, 1, number)
    row = learner.step(bench.plans[1])
    kept = bench.everywhere(equal(before, state(learner)))
    bench.arm("")
    again = learner.step(bench.plans[2])
    other.schedule.step(1)
    other.step(bench.plans[2])
    (bad,) = bench.bad
    return {
        "kept": kept,
        "as_if_never_seen": bench.everywhere(equal(state(learner), state(other))),
        "moved": bench.everywhere(not equal(before, state(learner))),
        "rows": [[m.get("loss/skipped_steps"), "loss/grad_norm" in m] for m in (first, row, again)],
        "schedule": learner.schedule.num_steps,
        "text": bad.text,
        "named": list(bad.rollouts),
        "want": ids_at(bench.plans[1], 1, number),
    }


def limit(bench: Bench) -> dict[str, Any]:
    """Two bad batches in a row under limits of 0, 1 and 2; with a good one between them."""
    found: dict[str, Any] = {}
    for most in (0, 1, 2):
        learner, taken, cause = bench.learner(most), 0, ""
        try:
            for plan in bench.plans[:2]:
                bench.arm("loss", 0)
                learner.step(plan)
                taken += 1
        except NonRetryableError as error:
            cause = str(error)
        found[str(most)] = [taken, cause, finite(learner), len(bench.bad)]
    learner = bench.learner(1)
    for n, kind in enumerate(("loss", "", "gradient", "")):
        bench.arm(kind, 0)
        learner.step(bench.plans[n])
    found["apart"] = len(bench.bad)
    return found


def minibatches(bench: Bench) -> dict[str, Any]:
    """Of two optimizer steps of a batch the first is bad."""
    learner, other = bench.learner(minibatches=2), bench.learner()
    parts = split_plan(bench.plans[0], learner.config.trainer, seed=learner.config.run.seed)
    bench.arm("loss", 1)
    row = learner.step(bench.plans[0])
    bench.arm("")
    other.step(parts[1].plan)
    return {
        "equal": bench.everywhere(equal(state(learner), state(other))),
        "skipped": row["loss/skipped_steps"],
        "norm": "loss/grad_norm" in row,
    }


@contextmanager
def one_rank_flips(learner: Learner, rank: int) -> Any:
    """The norm of one rank alone is not finite, as after a fault of its memory."""
    plain = learner.optimizer.get_grad_norm
    mine = learner.parallel.rank == rank
    learner.optimizer.get_grad_norm = lambda: plain() + (float("nan") if mine else 0.0)
    yield
    learner.optimizer.get_grad_norm = plain


def alone(bench: Bench) -> dict[str, Any]:
    bench.arm("")
    learner = bench.learner()
    before = state(learner)
    with one_rank_flips(learner, 1):
        learner.step(bench.plans[0])
    kept, text = bench.everywhere(equal(before, state(learner))), bench.bad[0].text
    return {"kept": kept, "text": text}


def unguarded(bench: Bench) -> bool:
    """Control: with Megatron's own step one bad gradient spoils the weights."""
    learner = bench.learner()
    learner.bad.agree = lambda is_finite: True
    bench.arm("gradient")
    learner.step(bench.plans[0])
    return finite(learner)


def critic(bench: Bench) -> dict[str, Any]:
    """The critic's own step is bad, the policy's is not; then the policy's."""
    learner = bench.learner(advantage="gae")
    bench.arm("")
    assert learner.critic is not None
    plain, weights = learner.critic._value_loss, learner.critic.model.tensors
    before = [t.detach().clone() for t in weights.values()]
    policy = state(learner)
    learner.critic._value_loss = lambda v, r: plain(v, r) * float("nan")
    row = learner.step(bench.plans[0])
    kept = equal(before, [t.detach().clone() for t in weights.values()])
    moved, learner.critic._value_loss = not equal(policy, state(learner)), plain
    bench.arm("loss")
    text = ""
    try:
        learner.step(bench.plans[1])
    except NonRetryableError as error:
        text = str(error)
    return {
        "kept": kept,
        "policy_moved": moved,
        "skipped": row["loss/skipped_steps"],
        "first": bench.bad[0].text,
        "second": text,
    }


def raised(bench: Bench) -> str:
    """An error of an objective on both ranks: alone, it would leave its peer waiting."""
    learner = bench.learner()
    bad_objective.arm("raises", 1)
    try:
        learner.step(bench.plans[0])
    except ValueError as error:
        return cause_of(error)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--work"):
        parser.add_argument(name, type=Path, required=True)
    options = parser.parse_args()
    bench = Bench(options.model, options.work)
    lora = LoraConfig(rank=4, alpha=8)
    checks: dict[str, Callable[[], Any]] = {
        "loss": lambda: skipped(bench, "loss", 1),
        "gradient": lambda: skipped(bench, "gradient", 1),
        "distributed": lambda: skipped(bench, "gradient", 0, distributed=True),
        "lora": lambda: skipped(bench, "gradient", 1, lora=lora),
        "limit": lambda: limit(bench),
        "minibatches": lambda: minibatches(bench),
        "alone": lambda: alone(bench),
        "unguarded": lambda: unguarded(bench),
        "critic": lambda: critic(bench),
        "raised": lambda: raised(bench),
    }
    found = {name: check() for name, check in checks.items()}
    if bench.ranks.rank == 0:
        print("FOUND", json.dumps(found), flush=True)
    parallel.stop()


if __name__ == "__main__":
    main()
