"""Score kept rollouts with the trainer's own forward pass: the numbers behind `moerl mismatch`.

    python -m moerl.distributed.torchrun --nproc-per-node N -m moerl.audit.score_ranks --job FILE...

The same model, replay and log-probability code as training.  Written to `job.out` (.npz), tokens in
the order of the rollouts file:

    rollout_ids [R], num_sampled [R]
    engine [S]                          the engine's log-probabilities
    DTYPE/VARIANT [S]                   the trainer's, for each precision and variant
    DTYPE/slots, DTYPE/slots_agree      (token, layer) pairs; same expert set live and recorded
    DTYPE/tokens, DTYPE/tokens_agree    fed-in tokens; same sets in all layers
    DTYPE/slots_clean                   pairs whose inputs no earlier difference has touched
    DTYPE/root_margin [D]               live router margin of each clean pair that differs
    DTYPE/layers [L]                    numbers of the MoE layers, for the next two
    DTYPE/layer_pairs [L, 4]            pairs, agreeing, clean, clean that differ; per layer
    DTYPE/layer_margin [L, 3]           5, 50, 95 % quantile of the live margin, all real tokens
    DTYPE/moved [S]                     a route differs at or before the token's logit row
    kept [S]                            size of the sampling mask, 0 without one
    DTYPE/executed                      pairs whose executed experts equal the record (all of them)

Executed experts are read from the map that the dispatcher acts on, not from the return value of
replay; a pair that differs from the record ends the job with an error.

Legend: R rollouts, S sampled tokens, N tokens of a microbatch in router order, K experts per token.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from moerl.algorithms.device_copies import to_host
from moerl.audit.score_job import VARIANTS, ScoreJob, load_job
from moerl.config.schema import ParallelConfig, Precision, TrainerConfig
from moerl.core.errors import MoerlError, RecordError
from moerl.core.serialization import decode_value
from moerl.core.types import BatchPlan, Episode, EpisodeGroup, Prompt, Rollout, Turn
from moerl.data.batching import plan_batch
from moerl.data.packing import Microbatch, pack_microbatch
from moerl.distributed.object_collectives import gather_values
from moerl.records.blob_ranges import read_logprobs
from moerl.records.blob_store import BlobStore
from moerl.records.segment_split import split_segments
from moerl.trainer.model.platform import prepare
from moerl.trainer.model.replay import Mode
from moerl.trainer.passes.probe import downstream

if TYPE_CHECKING:
    from moerl.trainer.model.gpt import Model
    from moerl.trainer.model.parallel import Parallel

Routes = dict[int, Tensor]  # layer -> [N, K]
_TIMEOUT_S = 600.0
_CORRUPTED_FRAC = 0.01


@dataclass(slots=True)
class ScoreTally:
    """Results of one precision on one rank; `merge` joins ranks."""

    logprobs: dict[str, dict[str, np.ndarray]] = field(default_factory=lambda: defaultdict(dict))
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    root_margin: list[np.ndarray] = field(default_factory=list)
    layer_pairs: dict[int, np.ndarray] = field(default_factory=dict)  # [4], see module docstring
    layer_margin: dict[int, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    moved: dict[str, np.ndarray] = field(default_factory=dict)  # by rollout id
    kept: dict[str, np.ndarray] = field(default_factory=dict)

    def merge(self, other: ScoreTally) -> None:
        for variant, found in other.logprobs.items():
            self.logprobs[variant] |= found
        for name, count in other.counts.items():
            self.counts[name] += count
        self.root_margin += other.root_margin
        for layer, pairs in other.layer_pairs.items():
            self.layer_pairs[layer] = self.layer_pairs.get(layer, 0) + pairs
        for layer, margins in other.layer_margin.items():
            self.layer_margin[layer] += margins
        self.moved |= other.moved
        self.kept |= other.kept


def main() -> None:
    parser = argparse.ArgumentParser(description="score kept rollouts with the trainer's forward")
    parser.add_argument("--job", type=Path, required=True, nargs="+", help="JSON of a ScoreJob")
    warnings.filterwarnings("ignore")  # megatron warns about every optional package it lacks
    try:
        _score([load_job(path) for path in parser.parse_args().job])
    except MoerlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # peers may hang in a collective: torchrun ends them


def _score(jobs: list[ScoreJob]) -> None:
    """Run all jobs in one trainer, started with the first job's settings."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    platform = prepare(jobs[0].platform, local_rank=rank, impl=jobs[0].transformer_impl)
    from moerl.trainer.model import parallel

    sizes = ParallelConfig(dp=int(os.environ.get("WORLD_SIZE", "1")), ep=jobs[0].ep)
    ranks = parallel.start(sizes, platform, timeout_s=_TIMEOUT_S)
    for job in jobs:
        _score_job(job, ranks)
    parallel.stop()


def _score_job(job: ScoreJob, ranks: Parallel) -> None:
    rollouts = _read_rollouts(job)
    plan = _plan(rollouts, job, ranks.world_size)
    store = BlobStore(Path(job.blob_dir), job.blob_node)
    tallies: dict[str, ScoreTally] = {
        dtype: _score_dtype(job, dtype, plan, store, ranks) for dtype in job.dtypes
    }
    every = gather_values(tallies, dict[str, ScoreTally], ranks.control)
    if ranks.is_first:
        _write(job, rollouts, every, store)


def _read_rollouts(job: ScoreJob) -> list[Rollout]:
    rollouts: list[Rollout] = decode_value(Path(job.rollouts).read_bytes(), list[Rollout])
    if job.version:
        parts = [part for rollout in rollouts for part in split_segments(rollout)]
        rollouts = [part for part in parts if str(part.versions[0].version) == job.version]
    if not rollouts:
        raise RecordError("empty", f"{job.rollouts} holds nothing to score")
    return rollouts


def _plan(rollouts: list[Rollout], job: ScoreJob, dp_size: int) -> BatchPlan:
    """A plan with every rollout once, for the newest version, because lag is not used."""
    prompt = Prompt(0, (), "", None, {})
    episodes = tuple(Episode(rollout.rollout_id, (Turn(rollout),)) for rollout in rollouts)
    newest = max(span.version for rollout in rollouts for span in rollout.versions)
    return plan_batch(
        0,
        newest,
        (EpisodeGroup(0, prompt, episodes),),
        dp_size=dp_size,
        max_tokens_per_microbatch=job.max_tokens_per_microbatch,
    )


@torch.no_grad()
def _score_dtype(
    job: ScoreJob, dtype: Precision, plan: BatchPlan, store: BlobStore, ranks: Parallel
) -> ScoreTally:
    from moerl.trainer.hf_io.hf_folder import HfFolder, load_hf
    from moerl.trainer.model.gpt import build, live_tensors

    trainer = TrainerConfig(
        dtype=dtype, parallel=ranks.sizes, dispatcher=job.dispatcher, megatron=job.megatron
    )
    folder = HfFolder(job.model)
    model = build(folder.spec, trainer, ranks, with_replay=True, fp32_head=job.fp32_head)
    load_hf(live_tensors(model.gpt), model.tiles, folder)
    model.module.eval()
    totals = ScoreTally()
    for index in range(plan.num_microbatches):
        batch = pack_microbatch(plan, ranks.dp_rank, index, store)
        _Scorer(model, batch, index, ranks, totals).run(job.variants)
    return totals


class _Scorer:
    """Scores all variants of one microbatch; variants with the same routes share a forward."""

    def __init__(
        self, model: Model, batch: Microbatch, index: int, ranks: Parallel, totals: ScoreTally
    ) -> None:
        assert model.replay is not None, "the model was built with replay"
        self.model, self.batch, self.index, self.ranks = model, batch, index, ranks
        self.totals, self.replay = totals, model.replay
        self.recorded = {
            layer: ids.long() for layer, ids in batch.routes(self.replay.layers).items()
        }
        self.real = _real_rows(batch)
        self.live: Routes = {}

    def run(self, variants: list[str]) -> None:
        self._score("live", self._live_states(), variants)
        for kind in dict.fromkeys(VARIANTS[name][0] for name in variants):
            if kind != "live":
                routes = self._altered(kind)
                self._score(kind, self._replayed_states(routes, kind), variants)

    def _live_states(self) -> Tensor:
        from moerl.trainer.passes import forward

        self._load_positions("live")
        hidden = forward.hidden_states(
            self.model, self.model.module, self.batch, self.index, Mode.RECORD
        )
        choices = {layer: self.replay.live(self.index, layer) for layer in self.replay.layers}
        self.live = to_host({layer: choice.ids for layer, choice in choices.items()})
        margins = to_host({layer: choice.margin.float() for layer, choice in choices.items()})
        differs = {}
        for layer, ids in self.live.items():
            live, recorded = ids.sort(1).values, self.recorded[layer].sort(1).values
            differs[layer] = (live != recorded).any(1) & self.real
        touched = downstream(differs, rows=len(self.batch.tokens))
        for layer, differ in differs.items():
            clean = self.real & ~touched[layer]
            margin = margins[layer]
            self.totals.root_margin.append(margin[differ & clean].numpy())
            self.totals.layer_margin[layer].append(margin[self.real].numpy())
            sets = (self.real, self.real & ~differ, clean, clean & differ)
            pairs = np.array([int(part.sum()) for part in sets])
            self.totals.layer_pairs[layer] = self.totals.layer_pairs.get(layer, 0) + pairs
            for name, count in zip(("slots", "slots_agree", "slots_clean"), pairs, strict=False):
                self.totals.counts[name] += int(count)
        self._per_token(differs, touched)
        agree = self.real & ~torch.stack(list(differs.values())).any(0)
        self.totals.counts["tokens"] += int(self.real.sum())
        self.totals.counts["tokens_agree"] += int(agree.sum())
        self.replay.clear()
        return hidden

    def _per_token(self, differs: Routes, touched: Routes) -> None:
        """Record which sampled tokens a routing difference can reach, and mask sizes."""
        batch, rows = self.batch, len(self.batch.tokens)
        reached = torch.stack([differs[layer] | touched[layer] for layer in differs]).any(0)
        length = batch.tokens.shape[1]
        row, position = batch.sampled_rows // length, batch.sampled_rows % length
        moved = reached[position * rows + row].numpy()
        sizes = torch.zeros(len(batch.sampled), dtype=torch.long)
        if batch.mask_offsets is not None:
            sizes = batch.mask_offsets.diff()
        for index, rollout in enumerate(batch.rollouts):
            mine = (batch.seq == index).numpy()
            self.totals.moved[rollout.rollout_id] = moved[mine]
            self.totals.kept[rollout.rollout_id] = sizes.numpy()[mine]

    def _load_positions(self, kind: str) -> None:
        """Recorded positions in every pass but the controls of sparse attention."""
        indexers, batch = self.model.indexers, self.batch
        if indexers is None:
            return
        indexers.clear()
        indexers.always_live = kind == "indexer_live"
        if not indexers.always_live:
            back = int(kind == "indexer_moved")
            indexers.load(
                self.index, lambda layer: batch.attended(layer).roll(back, 1), batch.num_fed
            )

    def _replayed_states(self, routes: Routes, kind: str) -> Tensor:
        from moerl.trainer.passes import forward

        self._load_positions(kind)
        self.replay.load(self.index, forward.local_rows(routes, self.ranks))
        with _executed(self.model) as executed:
            hidden = forward.hidden_states(
                self.model, self.model.module, self.batch, self.index, Mode.REPLAY
            )
        for layer, used in to_host(executed).items():
            want = torch.zeros_like(used).scatter_(1, routes[layer], True)
            wrong = (used != want).any(1)
            if bool(wrong.any()):
                raise RecordError(
                    "routing_executed",
                    f"layer {layer}: {int(wrong.sum())} tokens ran other experts than replayed",
                )
            if kind == "recorded":
                self.totals.counts["executed"] += int(self.real.sum())
        self.replay.finish_step()
        if self.model.indexers is not None:
            self.model.indexers.finish_step()
        return hidden

    def _score(self, kind: str, hidden: Tensor, variants: list[str]) -> None:
        from moerl.trainer.passes import forward

        for name in variants:
            routes, masked = VARIANTS[name]
            if routes != kind:
                continue
            batch = self.batch
            if not masked:
                batch = replace(batch, mask_offsets=None, mask_ids=None)
            scores = forward.sampled_logprobs(self.model, hidden, batch, self.ranks)
            logprob = scores.logprob.cpu()
            for row, rollout in enumerate(batch.rollouts):
                values = logprob[batch.seq == row].float().numpy()
                self.totals.logprobs[name][rollout.rollout_id] = values

    def _altered(self, kind: str) -> Routes:
        """The recorded routes, or the routes of a control."""
        recorded, rows = self.recorded, len(self.batch.tokens)
        if kind == "recorded" or kind.startswith("indexer"):
            return recorded
        if kind == "shifted":
            return {layer: ids.roll(rows, 0) for layer, ids in recorded.items()}
        if kind == "reversed":
            return dict(zip(recorded, reversed(list(recorded.values())), strict=True))
        if kind == "rotated":
            experts = self.replay.num_experts
            return {layer: (ids + 1) % experts for layer, ids in recorded.items()}
        if kind == "corrupted":
            return {layer: self._corrupted(ids, layer) for layer, ids in recorded.items()}
        assert kind == "prompt_live", kind
        prompt = _context_rows(self.batch)[:, None]
        return {
            layer: torch.where(prompt, self.live[layer], ids) for layer, ids in recorded.items()
        }

    def _corrupted(self, ids: Tensor, layer: int) -> Tensor:
        """1% of rows: the first expert is replaced by the next one not in the row."""
        generator = torch.Generator().manual_seed(layer + 1)
        chosen = torch.rand(len(ids), generator=generator) < _CORRUPTED_FRAC
        result = ids.clone()
        for row in chosen.nonzero()[:, 0].tolist():
            named = set(ids[row].tolist())
            free = [e for e in range(self.replay.num_experts) if e not in named]
            if free:
                first = int(ids[row, 0])
                result[row, 0] = min(free, key=lambda e: (e - first) % self.replay.num_experts)
        return result


@contextmanager
def _executed(model: Model) -> Iterator[dict[int, Tensor]]:
    """Routing maps [N, E] bool as each router passes them to its dispatcher, by layer."""
    maps: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            maps[layer] = output[1].detach().bool()

        return hook

    handles = [
        layer.mlp.router.register_forward_hook(keep(layer.layer_number - 1))
        for layer in model.gpt.decoder.layers
        if hasattr(layer.mlp, "router")
    ]
    try:
        yield maps
    finally:
        for handle in handles:
            handle.remove()


def _real_rows(batch: Microbatch) -> Tensor:
    """[S * B] bool, router order: rows that are fed-in tokens, not padding."""
    length = batch.tokens.shape[1]
    fed = torch.zeros(len(batch.tokens), dtype=torch.long)
    for row, rollout in enumerate(batch.rollouts):
        fed[row] = rollout.num_tokens - 1
    return (torch.arange(length)[:, None] < fed[None]).reshape(-1)


def _context_rows(batch: Microbatch) -> Tensor:
    """[S * B] bool, router order: fed-in tokens that the policy did not sample."""
    context = torch.zeros(batch.tokens.shape[::-1], dtype=torch.bool)
    for row, rollout in enumerate(batch.rollouts):
        context[: rollout.num_tokens - 1, row] = torch.from_numpy(~rollout.loss_mask[:-1])
    return context.reshape(-1)


def _write(
    job: ScoreJob, rollouts: list[Rollout], every: list[dict[str, ScoreTally]], store: BlobStore
) -> None:
    arrays: dict[str, Any] = {
        "rollout_ids": np.array([rollout.rollout_id for rollout in rollouts]),
        "num_sampled": np.array([rollout.num_sampled for rollout in rollouts]),
        "engine": np.concatenate([read_logprobs(store, rollout) for rollout in rollouts]),
    }
    for dtype in job.dtypes:
        totals = ScoreTally()
        for found in every:
            totals.merge(found[dtype])
        for variant, by_id in totals.logprobs.items():
            arrays[f"{dtype}/{variant}"] = np.concatenate(
                [by_id[rollout.rollout_id] for rollout in rollouts]
            )
        for name, count in totals.counts.items():
            arrays[f"{dtype}/{name}"] = np.array(count)
        arrays[f"{dtype}/root_margin"] = np.concatenate(totals.root_margin)
        layers = sorted(totals.layer_pairs)
        margins = [np.concatenate(totals.layer_margin[layer]) for layer in layers]
        arrays[f"{dtype}/layers"] = np.array(layers)
        arrays[f"{dtype}/layer_pairs"] = np.stack([totals.layer_pairs[layer] for layer in layers])
        arrays[f"{dtype}/layer_margin"] = np.stack(
            [np.quantile(margin, (0.05, 0.5, 0.95)) for margin in margins]
        )
        for name, by_id in (("moved", totals.moved), ("kept", totals.kept)):
            values = np.concatenate([by_id[rollout.rollout_id] for rollout in rollouts])
            arrays[f"{dtype}/moved" if name == "moved" else "kept"] = values
    np.savez(job.out, **arrays)


if __name__ == "__main__":
    main()
