"""Worker of test_replay_matrix: many layouts, models and settings in one start of four processes.

Starting a process costs more than a case, so a worker lives through several trainers.  Stages run
one after the other: one-rank references, then trainers of two, then one trainer of four; `SCHEDULE`
says who belongs where.  Every case writes NAME.pt (rank 0 of its trainer); the test compares.

    LOCAL_RANK=0 python replay_matrix_ranks.py WORK     (four of them, LOCAL_RANK = 0..3)
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from moerl.trainer.model import platform

PLACE = platform.prepare("cpu")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from moerl.config.schema import (  # noqa: E402
    AlgorithmConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ReplayConfig,
    TrainerConfig,
)
from moerl.core.types import BatchPlan, EpisodeGroup, PolicyVersion, Rollout, Turn  # noqa: E402
from moerl.data.batching import plan_batch  # noqa: E402
from moerl.data.packing import Microbatch, pack_microbatch  # noqa: E402
from moerl.layout import hf_shapes, model_spec  # noqa: E402
from moerl.records.blob_store import BlobStore  # noqa: E402
from moerl.trainer.checkpoints import checkpoint  # noqa: E402
from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf  # noqa: E402
from moerl.trainer.learner.critic import Critic  # noqa: E402
from moerl.trainer.learner.step import Learner  # noqa: E402
from moerl.trainer.model import parallel  # noqa: E402
from moerl.trainer.model.gpt import Model, build  # noqa: E402
from moerl.trainer.model.parallel import Parallel  # noqa: E402
from moerl.trainer.model.replay import Mode  # noqa: E402
from moerl.trainer.model.transformer import equal_shapes  # noqa: E402
from moerl.trainer.passes import forward, probe  # noqa: E402
from tests.helpers.attended_keys import compare_attended, watching_attention  # noqa: E402
from tests.helpers.critic_cases import critic_step  # noqa: E402
from tests.helpers.hf_gather import HfGather  # noqa: E402
from tests.helpers.patience import patience  # noqa: E402
from tests.helpers.rank_server import meet_apart  # noqa: E402
from tests.helpers.replay_matrix_records import V0, Records, make_records  # noqa: E402
from tests.helpers.saved_checkpoint import save_whole  # noqa: E402

Rows = dict[int, torch.Tensor]


@dataclass
class Seen:
    """What a case did on this rank, noted from outside the code under test."""

    logprobs: dict[str, torch.Tensor] = field(default_factory=dict)
    forward: dict[int, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    recompute: dict[int, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    mask_ids: int = 0  # sum over all kept ids


def main() -> None:
    work = Path(sys.argv[1])
    me = int(os.environ["LOCAL_RANK"])
    stages = json.loads((work / "schedule.json").read_text())
    for number, job in enumerate(job for stage in stages for job in stage):
        if me in job["ranks"]:
            os.environ["RANK"] = str(job["ranks"].index(me))
            os.environ["WORLD_SIZE"] = str(len(job["ranks"]))
            meet_apart(number)
            ranks = parallel.start(ParallelConfig(**job["sizes"]), PLACE, timeout_s=patience(90))
            for case in job["cases"]:
                run_case(work, case, ranks)
            dist.barrier()
            parallel.stop()


def run_case(work: Path, case: dict[str, Any], ranks: Parallel) -> None:
    """One model in one layout: log-probabilities, gradients, executed experts, counts."""
    learner, records = make_learner(work, case, ranks)
    plan = records.plan(ranks.dp_size)
    found: dict[str, Any] = {}
    other = OTHER.get(case.get("does", "gradients"))
    if other is not None:
        found = other(work, case, learner, records)
        if ranks.is_first:
            torch.save(found, work / f"{case['name']}.pt")
        return
    with ExitStack() as watched:
        seen = watched.enter_context(watching(learner, wrong_loader(case, learner, plan)))
        if learner.model.indexers is not None:
            moved = case.get("alter") == "positions_moved"
            attended = watched.enter_context(watching_attention(learner, moved=moved))
        sums = learner.gradients(plan)
    if learner.model.indexers is not None:
        same = compare_attended(attended, learner, records, plan)
        names = ("forward_calls", "forward_right", "recompute_calls", "recompute_right")
        found["attended"] = {name: int(total(same[name], ranks)) for name in names}
        found["read_bytes"] = sums.counts["indexer_bytes"]
    found["counts"] = sums.counts
    found["recorded"] = {
        "fed": records.num_fed,
        "sampled": records.num_sampled,
        "kept": records.num_kept,
        "mask_ids": records.sum_kept_ids,
        "routing_bytes": records.num_fed * len(learner.model.spec.moe_layers) * records.top_k,
    }
    found["logprobs"] = joined_logprobs(seen, ranks)
    found["executed"] = check_executed(seen, learner, records, plan)
    assert learner.model.replay is not None
    found["peak_bytes"] = everyone(learner.model.replay.peak_bytes, ranks)
    found["mask_ids"] = total(seen.mask_ids if ranks.tp_rank == 0 else 0, ranks)
    found["gradients"] = gather_gradients(learner)
    if case.get("controls"):
        found["controls"] = control_logprobs(learner, plan)
    if case.get("resume"):
        found["resumed"] = resumed(work, case, learner, plan)
    if ranks.is_first:
        torch.save(found, work / f"{case['name']}.pt")


def several_steps(
    _work: Path, _case: dict[str, Any], learner: Learner, records: Records
) -> dict[str, Any]:
    """A batch in several optimizer steps: what came out, and experts of the passes compared.

    Forwards of a layer come in order: first all minibatches of the proximal pass, then those of
    training, with the same microbatches.
    """
    plan = records.plan(learner.parallel.dp_size)
    before = gather_tensors(learner, lambda t: t.detach())
    asked = probe.probe(learner.model, plan, learner.config, learner.parallel, learner.store)
    with watching(learner, None) as seen:
        metrics = learner.step(plan)
    ranks, same = learner.parallel, dict.fromkeys(("maps", "trained", "recomputed"), 0)
    for layer, maps in seen.forward.items():
        proximal, trained = maps[: len(maps) // 2], maps[len(maps) // 2 :]
        again = seen.recompute[layer] or trained
        assert len(proximal) == len(trained) == len(again)
        same["maps"] += len(proximal)
        same["trained"] += sum(map(torch.equal, proximal, trained))
        same["recomputed"] += sum(map(torch.equal, proximal, again))
    after = gather_tensors(learner, lambda t: t.detach())
    moved = None
    if before is not None and after is not None:
        moved = {name: after[name] - before[name] for name in before}
    return {
        "logprobs": joined_logprobs(seen, ranks),
        "experts": {name: total(count, ranks) for name, count in same.items()},
        "metrics": {n: v for n, v in metrics.items() if n.startswith(("loss/", "mismatch/"))},
        "moved": moved,
        "probe": asked,
    }


@torch.no_grad()
def record_live(
    work: Path, case: dict[str, Any], learner: Learner, records: Records
) -> dict[str, Any]:
    """One rank leaves what an engine with these weights would record, for cases that probe."""
    model, live = learner.model, {}
    assert model.replay is not None
    batch = pack_microbatch(one_microbatch(records.groups, 1), 0, 0, learner.store)
    hidden = forward.hidden_states(model, model.module, batch, 0, Mode.RECORD)
    logprob = forward.sampled_logprobs(model, hidden, batch, learner.parallel).logprob
    ids = torch.stack([choice.ids for choice in model.replay.take_live(0).values()]).byte()
    for row, rollout in enumerate(batch.rollouts):
        mine = ids[:, row :: len(batch.tokens)][:, : rollout.num_tokens - 1]
        live[rollout.rollout_id] = (mine.clone(), logprob[batch.seq == row])
    torch.save(live, work / f"live.{case['model']}.pt")
    return {}


def probed(work: Path, case: dict[str, Any], learner: Learner, records: Records) -> dict[str, Any]:
    """The probe over right records, and over the same ones with each row at the next token."""
    live = torch.load(work / f"live.{case['model']}.pt", weights_only=True)
    found = {}
    for name, shift in (("right", 0), ("shifted", 1)):

        def recorded(rollout: Rollout, name: str = name, shift: int = shift) -> Rollout:
            ids, logprob = live[rollout.rollout_id]
            rows = ids.roll(shift, 1).contiguous().numpy()
            (ref,) = learner.store.seal(f"{name}.{rollout.rollout_id}", [rows])
            whole = replace(rollout.routing[0], ids=ref, row_begin=0, row_end=rows.shape[1])
            return replace(rollout, routing=(whole,), logprobs=logprob.numpy(), sealed_logprobs=())

        groups = [
            replace(
                group,
                episodes=tuple(
                    replace(episode, turns=(Turn(recorded(episode.turns[0].rollout)),))
                    for episode in group.episodes
                ),
            )
            for group in records.groups
        ]
        plan = one_microbatch(groups, learner.parallel.dp_size)
        found[name] = probe.probe(
            learner.model, plan, learner.config, learner.parallel, learner.store
        )
    return found


def one_microbatch(groups: Sequence[EpisodeGroup], dp_size: int) -> BatchPlan:
    plan = plan_batch(0, V0, groups, dp_size=dp_size, max_tokens_per_microbatch=10**6)
    assert plan.num_microbatches == 1
    return plan


def with_critic(
    work: Path, case: dict[str, Any], learner: Learner, records: Records
) -> dict[str, Any]:
    """One step with a critic (`critic_cases`)."""
    plan, ranks = records.plan(learner.parallel.dp_size), learner.parallel
    again = partial(make_learner, work, case | {"name": f"{case['name']}.again"}, ranks)
    return critic_step(case, learner, plan, lambda: again()[0], work / f"run.{case['name']}")


OTHER = {
    "several_steps": several_steps,
    "record_live": record_live,
    "probed": probed,
    "with_critic": with_critic,
}


def resumed(
    work: Path, case: dict[str, Any], learner: Learner, plan: BatchPlan
) -> dict[str, tuple[float, float]]:
    """(uninterrupted, resumed) of the second step, after a checkpoint of the first."""
    ranks, root = learner.parallel, work / f"run.{case['name']}"
    learner.step(plan)
    progress = checkpoint.Progress(version=PolicyVersion(0, 1), consumed=((0, 2),))
    path = save_whole(root, learner, progress, ranks)
    again, _ = make_learner(work, case | {"name": f"{case['name']}.again"}, ranks)
    assert checkpoint.load(path, again, ranks) == progress
    want, got = learner.step(plan), again.step(plan)
    return {name: (want[name], got[name]) for name in ("loss/total", "loss/grad_norm")}


def make_learner(work: Path, case: dict[str, Any], ranks: Parallel) -> tuple[Learner, Records]:
    folder = work / "models" / case["model"] / f"rank{os.environ['LOCAL_RANK']}"
    if not folder.exists():
        write_model(folder, json.loads((work / f"{case['model']}.json").read_text()))
    optimizer = OptimizerConfig(lr=1.0, min_lr=1.0, eps=10.0, clip_grad=0.0)
    trainer = TrainerConfig(
        parallel=ranks.sizes,
        optimizer=optimizer,
        dispatcher=case.get("dispatcher", "alltoall"),
        packing=case.get("packing", False),
        megatron=case.get("megatron", {}) | case.get("router_losses", {}),
        minibatches=case.get("minibatches", 1),
    )
    config = Config(
        trainer=trainer,
        replay=ReplayConfig(routing=case.get("routing", "R3")),
        algorithm=AlgorithmConfig(**case.get("algorithm", {})),
        model=ModelConfig(path=str(folder)),
    )
    source = HfFolder(folder)
    model = build(source.spec, trainer, ranks, with_replay=True)
    load_hf(model.tensors, model.tiles, source)
    store = BlobStore(folder / f"blobs.{case['name']}", "n0")
    critic = None
    if config.algorithm.advantage == "gae":
        critic = Critic(config, ranks, store)
    learner = Learner(model, ranks, config, store, critic)
    return learner, make_records(store, source.spec, longest=case.get("longest", 0))


def write_model(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: 0.15 * torch.randn(shape, generator=generator) + ("norm" in name)
        for name, shape in hf_shapes(model_spec(config)).items()
    }
    save_file(tensors, folder / "model.safetensors")


# --- watching from outside ------------------------------------------------------------------------
@contextmanager
def watching(learner: Learner, alter: Callable[..., Any] | None) -> Iterator[Seen]:
    """Notes routing maps as the dispatchers get them, and log-probabilities, of one pass."""
    seen, model = Seen(), learner.model
    assert model.replay is not None
    replay, score, load = model.replay, forward.sampled_logprobs, forward.load_routes
    read = forward.read_routes

    def keep(layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            first = replay._pass is not None
            (seen.forward if first else seen.recompute)[layer].append(output[1].detach().bool())

        return hook

    def scored(model: Model, hidden: Any, batch: Microbatch, ranks: Parallel, **asked: Any) -> Any:
        scores = score(model, hidden, batch, ranks, **asked)
        for row, rollout in enumerate(batch.rollouts):
            values = scores.logprob.detach()[batch.seq == row].clone()
            seen.logprobs[rollout.rollout_id] = values
        if batch.mask_ids is not None:
            seen.mask_ids += int(batch.mask_ids.sum())
        return scores

    handles = [
        layer.mlp.router.register_forward_hook(keep(layer.layer_number - 1))
        for chunk in model.chunks
        for layer in chunk.gpt.decoder.layers
        if hasattr(layer.mlp, "router")
    ]
    forward.sampled_logprobs = scored
    if alter is not None:  # which reads for itself
        forward.load_routes, forward.read_routes = alter, lambda *_: None
    try:
        yield seen
    finally:
        forward.sampled_logprobs, forward.load_routes = score, load
        forward.read_routes = read
        for handle in handles:
            handle.remove()


def joined_logprobs(seen: Seen, ranks: Parallel) -> dict[str, torch.Tensor]:
    """By rollout; every rank that computed one must have got the same."""
    every: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks.world_size)]
    dist.all_gather_object(every, seen.logprobs, group=ranks.control)
    result: dict[str, torch.Tensor] = {}
    for part in every:
        for name, values in part.items():
            assert name not in result or torch.equal(result[name], values), f"ranks differ: {name}"
            result[name] = values
    return result


def everyone(value: int, ranks: Parallel) -> list[int]:
    every = [0] * ranks.world_size
    dist.all_gather_object(every, value, group=ranks.control)
    return every


def total(value: float, ranks: Parallel) -> float:
    number = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(number, group=ranks.control)
    return float(number)


def gather_gradients(learner: Learner) -> dict[str, torch.Tensor] | None:
    return gather_tensors(learner, lambda t: getattr(t, "main_grad", t))


def gather_tensors(
    learner: Learner, view: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor] | None:
    """Whole tensors on rank 0, of what `view` says of each parameter."""
    model, ranks = learner.model, learner.parallel
    tensors = {name: view(t) for name, t in model.tensors.items()}
    gather = HfGather(lambda: tensors, model.spec, ranks.sizes, ranks.rank, "local", ranks.control)
    whole = gather.gather()
    return None if whole is None else {name: t.clone() for name, t in whole.items()}


# --- the oracle of executed experts: Megatron's slicing, written again ----------------------------
def check_executed(
    seen: Seen, learner: Learner, records: Records, plan: BatchPlan
) -> dict[str, int]:
    """Over all ranks: routing maps, and those equal to the record, padding included.

    A layer sees its microbatches in order in every schedule, forward and recompute alike.
    """
    names = [f"{kind}_{what}" for kind in ("forward", "recompute") for what in ("maps", "right")]
    result = dict.fromkeys(names, 0)
    for kind in ("forward", "recompute"):
        for layer, maps in getattr(seen, kind).items():
            for index, used in enumerate(maps):
                ids = expected_ids(records, plan, index, layer, len(used), learner)
                want = torch.zeros_like(used).scatter_(1, ids, True)
                result[f"{kind}_right"] += int(torch.equal(used, want))
                result[f"{kind}_maps"] += 1
    return {name: int(total(count, learner.parallel)) for name, count in result.items()}


def expected_ids(
    records: Records, plan: BatchPlan, microbatch: int, layer: int, rows: int, learner: Learner
) -> torch.Tensor:
    ranks = learner.parallel
    cp, tp = ranks.cp_size, ranks.tp_size
    chosen = sorted(
        (row.row, row.group, row.episode)
        for row in plan.rows
        if row.dp_rank == ranks.dp_rank and row.microbatch == microbatch
    )
    routes = [torch.from_numpy(records.routes[g, e][layer].astype(np.int64)) for _, g, e in chosen]
    k = records.top_k

    def padded(ids: torch.Tensor, length: int) -> torch.Tensor:
        return torch.cat([ids, torch.arange(k).expand(length - len(ids), k)])

    def zigzag(ids: torch.Tensor) -> torch.Tensor:  # along dim 0
        if cp == 1:
            return ids
        parts = ids.chunk(2 * cp)
        return torch.cat([parts[ranks.cp_rank], parts[2 * cp - 1 - ranks.cp_rank]])

    total_rows = rows * tp * cp
    if learner.config.trainer.packing:
        unit = 2 * cp if cp > 1 else 1
        parts = [padded(ids, -(-len(ids) // unit) * unit) for ids in routes]
        rest = total_rows - sum(len(part) for part in parts)
        parts += [padded(torch.empty(0, k, dtype=torch.long), rest)] if rest else []
        local = torch.cat([zigzag(part) for part in parts])
    else:
        batch = max(len(routes), learner_rows(learner, plan))
        length = total_rows // batch
        routes += [torch.empty(0, k, dtype=torch.long)] * (batch - len(routes))
        local = zigzag(torch.stack([padded(ids, length) for ids in routes], 1)).flatten(0, 1)
    return local.chunk(tp)[ranks.tp_rank]


def learner_rows(learner: Learner, plan: BatchPlan) -> int:
    """Rows every microbatch has at least: one, or the most where all must have one shape."""
    if not equal_shapes(learner.config.trainer):
        return 1
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for row in plan.rows:
        counts[row.dp_rank, row.microbatch] += 1
    return max(counts.values())


# --- controls -------------------------------------------------------------------------------------
def wrong_loader(
    case: dict[str, Any], learner: Learner, plan: BatchPlan
) -> Callable[..., None] | None:
    """A `load_routes` that gives wrong rows, for a case with `alter`; None otherwise."""
    kind = case.get("alter")
    if kind in (None, "positions_moved"):
        return None

    def load(
        model: Model, batch: Microbatch, microbatch: int, ranks: Parallel, chunk: int = 0
    ) -> None:
        assert model.replay is not None
        if kind == "wrong_microbatch":
            other = (microbatch + 1) % plan.num_microbatches
            grid = forward.grid_of(ranks, learner.config.trainer, tuple(batch.tokens.shape))
            batch = pack_microbatch(plan, ranks.dp_rank, other, learner.store, grid=grid)
        routes = batch.routes(model.replay.chunks[chunk], forward.routed_slots(batch, ranks))
        model.replay.load(microbatch, altered(kind, routes, len(batch.tokens)), chunk)

    return load


def altered(kind: str, routes: Rows, rows: int) -> Rows:
    if kind == "shifted":
        return {layer: ids.roll(rows, 0) for layer, ids in routes.items()}
    if kind == "reversed":
        return dict(zip(routes, reversed(list(routes.values())), strict=True))
    if kind == "corrupted":
        return {layer: corrupted(ids, layer) for layer, ids in routes.items()}
    assert kind == "wrong_microbatch", kind
    return routes


def corrupted(ids: torch.Tensor, layer: int) -> torch.Tensor:
    """1% of the rows, at least one: the first expert becomes the next that the row lacks."""
    result, generator = ids.clone(), torch.Generator().manual_seed(layer)
    for row in torch.randperm(len(ids), generator=generator)[: max(1, len(ids) // 100)].tolist():
        named = set(ids[row].tolist())
        result[row, 0] = min(set(range(8)) - named)
    return result


@torch.no_grad()
def control_logprobs(learner: Learner, plan: BatchPlan) -> dict[str, dict[str, torch.Tensor]]:
    """Controls that need live routes or logits, on one rank: prompt live, no mask, other mask."""
    model, ranks = learner.model, learner.parallel
    found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    assert model.replay is not None
    for index in range(plan.num_microbatches):
        batch = pack_microbatch(plan, 0, index, learner.store)
        forward.hidden_states(model, model.module, batch, index, Mode.RECORD)
        live = {layer: model.replay.live(index, layer).ids for layer in model.replay.layers}
        model.replay.clear()
        routes = batch.routes(model.replay.layers)
        right = replayed(learner, batch, index, routes)
        prompt = torch.zeros(batch.tokens.shape, dtype=torch.bool)
        for row, rollout in enumerate(batch.rollouts):
            prompt[row, : rollout.prompt_len] = True
        where = prompt.T.reshape(-1, 1)
        mixed = {layer: torch.where(where, live[layer], ids) for layer, ids in routes.items()}
        for name, hidden, scored in (
            ("right", right, batch),
            ("response_only", replayed(learner, batch, index, mixed), batch),
            ("no_mask", right, replace(batch, mask_offsets=None, mask_ids=None)),
            ("other_temperature", right, colder(batch, right[0] @ model.head(ranks.tp).weight.T)),
        ):
            logprob = forward.sampled_logprobs(model, hidden, scored, ranks).logprob
            for row, rollout in enumerate(batch.rollouts):
                found[name][rollout.rollout_id] = logprob[batch.seq == row]
    return dict(found)


def replayed(learner: Learner, batch: Microbatch, index: int, routes: Rows) -> torch.Tensor:
    model = learner.model
    assert model.replay is not None
    model.replay.load(index, routes)
    hidden = forward.hidden_states(model, model.module, batch, index, Mode.REPLAY)
    model.replay.finish_step()
    return hidden


def colder(batch: Microbatch, logits_MV: torch.Tensor) -> Microbatch:
    """What top-p 0.8 would leave of the recorded sampling masks at a third of the temperature."""
    assert batch.mask_offsets is not None
    assert batch.mask_ids is not None
    kept = []
    for token, (begin, end) in enumerate(pairwise(batch.mask_offsets.tolist())):
        ids = batch.mask_ids[begin:end]
        p, order = (logits_MV[token, ids] / 0.3).softmax(0).sort(descending=True)
        ids = ids[order[p.cumsum(0) - p <= 0.8]]
        kept.append(torch.unique(torch.cat([ids, batch.sampled[token : token + 1]])))
    offsets = torch.tensor([0, *(len(row) for row in kept)]).cumsum(0)
    return replace(batch, mask_offsets=offsets, mask_ids=torch.cat(kept))


if __name__ == "__main__":
    main()
