"""Worker of test_minibatches: one rank; prints what batches in one and two optimizer steps did.

torchrun ... minibatch_ranks.py --model DIR --work DIR
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moerl.trainer.model import platform

PLACE = platform.prepare("cpu")

import torch  # noqa: E402
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker  # noqa: E402

from moerl.config.schema import (  # noqa: E402
    AlgorithmConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ReplayConfig,
    TrainerConfig,
)
from moerl.data.batching import split_plan  # noqa: E402
from moerl.records.blob_store import BlobStore  # noqa: E402
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf  # noqa: E402
from moerl.trainer.learner.parked import PARTS, Parked  # noqa: E402
from moerl.trainer.learner.step import Learner  # noqa: E402
from moerl.trainer.model import parallel  # noqa: E402
from moerl.trainer.model.gpt import build  # noqa: E402
from tests.helpers.patience import patience  # noqa: E402
from tests.helpers.trainer_support import make_plan  # noqa: E402

Maps = list[torch.Tensor]
PROXIMAL = AlgorithmConfig(ratio="proximal", corrections=["tis_token"])
PAIRS = AlgorithmConfig(
    advantage="online_dpo", objective="reinforce", aggregation="seq_mean_token_sum", dpo_beta=1.0
)


class Bench:
    def __init__(self, model: Path, work: Path) -> None:
        self.folder = HfFolder(str(model))
        self.ranks = parallel.start(ParallelConfig(), PLACE, timeout_s=patience(60))
        self.store = BlobStore(work / "blobs", "n0")
        self.plan = make_plan(self.store, groups=4, max_tokens=48)

    def learner(
        self,
        routing: str,
        minibatches: int,
        algorithm: AlgorithmConfig = PROXIMAL,
        **megatron: Any,
    ) -> Learner:
        # eps far above the gradients makes Adam's step proportional to them
        optimizer = OptimizerConfig(lr=3.0, min_lr=3.0, eps=10.0, clip_grad=0.0)
        config = Config(
            model=ModelConfig(path=str(self.folder.path)),
            trainer=TrainerConfig(minibatches=minibatches, optimizer=optimizer, megatron=megatron),
            replay=ReplayConfig(routing=routing),
            algorithm=algorithm,
        )
        model = build(self.folder.spec, config.trainer, self.ranks, with_replay=routing != "off")
        load_hf(model.tensors, model.tiles, self.folder)
        return Learner(model, self.ranks, config, self.store)


@contextmanager
def experts(learner: Learner) -> Iterator[Maps]:
    """Routing maps of every router call in a forward, in order."""
    seen: Maps = []
    handles = [
        layer.mlp.router.register_forward_hook(lambda _m, _i, out: seen.append(out[1].bool()))
        for layer in learner.model.gpt.decoder.layers
    ]
    yield seen
    for handle in handles:
        handle.remove()


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in learner.model.tensors.items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def same_maps(a: Maps, b: Maps) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def one_step(bench: Bench) -> dict[str, Any]:
    """R2 in one optimizer step against the live router, and against the engine's routes."""
    found = {}
    for routing in ("off", "R2", "R3"):
        learner = bench.learner(routing, 1)
        metrics = learner.step(bench.plan)
        found[routing] = (weights(learner), metrics)
    return {
        "r2_is_live": equal(found["R2"][0], found["off"][0]),
        "r3_is_live": equal(found["R3"][0], found["off"][0]),
        "same_loss": found["R2"][1]["loss/pg"] == found["off"][1]["loss/pg"],
        "cover": found["R2"][1]["routing/replay_cover_frac"],
        "bytes": found["R2"][1]["routing/bytes_per_token"],
    }


def two_steps(bench: Bench) -> dict[str, Any]:
    """The second minibatch: whose experts, whose proximal log-probabilities."""
    learner = bench.learner("R2", 2)
    parts = split_plan(bench.plan, learner.config.trainer, seed=learner.config.run.seed)
    fresh = bench.learner("off", 1)
    with experts(fresh) as old:
        want = fresh.gradients(parts[1].plan).mismatch.metrics()["mismatch/abs_dlogp_mean"]
    with experts(learner) as maps:
        metrics = learner.step(bench.plan)
    moved = bench.learner("off", 1)
    moved.model.gpt.load_state_dict(learner.model.gpt.state_dict(), strict=False)
    with experts(moved) as later:
        other = moved.gradients(parts[1].plan).mismatch.metrics()["mismatch/abs_dlogp_mean"]
    both = bench.learner("off", 1).gradients(bench.plan).mismatch.metrics()
    return {
        "second_runs_old_experts": same_maps(maps[-len(old) :], old),
        "later_weights_do": same_maps(maps[-len(later) :], later),
        "mismatch": [metrics["mismatch/abs_dlogp_mean"], both["mismatch/abs_dlogp_mean"]],
        "mismatch_moved": [want, other],
        "moved_k3": metrics["loss/moved_k3"],
        "groups": [[group.group_id for group in part.plan.groups] for part in parts],
        "rows": sorted(row for part in parts for row in part.rows),
    }


def plain_steps(bench: Bench) -> dict[str, Any]:
    """With the ratio against the engine, two optimizer steps are two plans, one after the other."""
    learner, other = (bench.learner("R3", n, AlgorithmConfig()) for n in (2, 1))
    metrics = learner.step(bench.plan)
    parts = split_plan(bench.plan, learner.config.trainer, seed=learner.config.run.seed)
    rows = [other.step(part.plan) for part in parts]
    backwards = bench.learner("R3", 1, AlgorithmConfig())
    for part in reversed(parts):
        backwards.step(part.plan)
    return {
        "equal": equal(weights(learner), weights(other)),
        "backwards_equal": equal(weights(learner), weights(backwards)),
        "pg": [metrics["loss/pg"], sum(row["loss/pg"] for row in rows) / 2],
        "tokens": [metrics["loss/tokens"], sum(row["loss/tokens"] for row in rows)],
        "grad_norm": [metrics["loss/grad_norm"], max(row["loss/grad_norm"] for row in rows)],
        "lr": [metrics["loss/lr"], rows[0]["loss/lr"]],
        "schedule": [learner.schedule.num_steps, other.schedule.num_steps],
    }


def second_moment(bench: Bench) -> dict[str, Any]:
    """What M2PO cut of the whole batch, in one and in two optimizer steps."""
    result = {}
    for limit in (0.5, 1e9):
        algorithm = AlgorithmConfig(objective="importance", corrections=["m2"], m2_limit=limit)
        rows = [bench.learner("R3", n, algorithm).step(bench.plan) for n in (1, 2)]
        result[str(limit)] = [row["loss/cut_frac/m2"] for row in rows]
    return result


def pairs(bench: Bench) -> dict[str, Any]:
    """Online DPO: the loss before and after a few steps on one plan."""
    learner = bench.learner("off", 1, PAIRS)
    return {"loss": [learner.step(bench.plan)["dpo/loss"] for _ in range(4)]}


def router_losses(bench: Bench) -> dict[str, Any]:
    """z and balance loss against megatron-core's own, where both are the same by definition: equal
    lengths, no padding, and a record that is the live choice (R2)."""
    z, balance, size, rows = 0.3, 0.2, 9, 4
    plan = make_plan(bench.store, seed=1, groups=4, max_tokens=rows * size, length=size)
    tokens = size * len(plan.rows)

    def gradients(routing: str, *, own: bool) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        coefficients = {"moe_z_loss_coeff": z, "moe_aux_loss_coeff": balance}
        learner = bench.learner(
            routing,
            1,
            AlgorithmConfig(advantage="none"),
            moe_router_load_balancing_type="seq_aux_loss",
            **coefficients,
        )
        ours = learner.router_losses
        assert ours is not None
        # Its losses are weighted by the tokens of a microbatch and the size of the group that
        # shares it, for a division by all tokens that plain sums never do.
        if not own:
            for layer in learner.model.gpt.decoder.layers:
                router = layer.mlp.router
                del router.apply_z_loss, router._apply_seq_aux_loss
                shared = tokens * router.tp_cp_group.size()
                router.config.moe_z_loss_coeff = z / shared
                router.config.moe_aux_loss_coeff = balance / shared
            get_moe_metrics_tracker().clear()
        learner.gradients(plan)
        grads = {name: t.main_grad.clone() for name, t in learner.model.tensors.items()}
        if own:
            return grads, dict(ours.values)
        seen = get_moe_metrics_tracker().metrics
        mean = {name: float(one.values.sum()) / plan.num_microbatches for name, one in seen.items()}
        theirs = {
            "router_z": z * mean["z_loss"],
            "router_balance": balance * mean["seq_load_balancing_loss"],
        }
        return grads, theirs

    grads, values = gradients("R2", own=True)
    want, theirs = gradients("R2", own=False)
    other, other_values = gradients("R3", own=True)  # control: a record that is not the live choice

    def distance(a: dict[str, torch.Tensor]) -> float:
        every = torch.cat([(a[name] - want[name]).flatten() for name in want])
        return float(every.norm() / torch.cat([g.flatten() for g in want.values()]).norm())

    return {
        "microbatches": plan.num_microbatches,
        "distance": distance(grads),
        "distance_other": distance(other),
        "values": values,
        "theirs": theirs,
        "other": other_values,
        "router_gradient": min(
            float(g.norm()) for name, g in want.items() if name.endswith("router.weight")
        ),
    }


def parked(bench: Bench) -> dict[str, Any]:
    """Two steps, and two between which everything leaves the memory of the process and returns."""
    found, sizes = [], {}
    for parts in ((), PARTS, PARTS):
        learner = bench.learner("R3", 1)
        learner.step(bench.plan)
        away = Parked(learner, bench.ranks.device)
        sizes = {part: away.out([part]) for part in parts}
        empty = sum(t.untyped_storage().nbytes() for t in learner.model.tensors.values())
        if len(found) == 2:  # control: contents that do not come back
            away._host["optimizer"].zero_()
        away.back()
        learner.step(bench.plan)
        found.append(weights(learner))
    return {
        "equal": equal(found[0], found[1]),
        "lost_is_equal": equal(found[0], found[2]),
        "empty": empty,
        "sizes": list(sizes.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--work"):
        parser.add_argument(name, type=Path, required=True)
    options = parser.parse_args()
    bench = Bench(options.model, options.work)
    checks = (one_step, two_steps, plain_steps, second_moment, pairs, router_losses, parked)
    print("FOUND", json.dumps({check.__name__: check(bench) for check in checks}))
    parallel.stop()


if __name__ == "__main__":
    main()
