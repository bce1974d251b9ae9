"""`moerl mismatch`: scores rollouts with {none, routing, mask, both} replayed.

The rollouts are fresh, at lag 0, or from a file of any system (docs/formats.md).  No Ray and no
training: one engine host in this process, then one scoring trainer through torchrun, with the
classes that training uses.  Engine and trainer of equal precision on equal kernels have no gap to
close, so the trainer scores in bf16 as well as in fp32.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from moerl.algorithms.mismatch import MismatchSums
from moerl.audit.dumps import NEWEST, read_dump
from moerl.audit.mismatch_page import (
    CAUSES,
    VARIANTS,
    attribute,
    by_lag,
    by_position,
    cause_of_tokens,
    write_page,
)
from moerl.audit.score_job import ScoreJob
from moerl.config import Config, load_config, resolve
from moerl.config.checks import check, check_model
from moerl.config.clusters import placement, visible_devices
from moerl.config.schema import Precision
from moerl.config.task_mixture import entries_of
from moerl.core.errors import ConfigError, EngineError, RecordError, TrainerError
from moerl.core.serialization import encode_value
from moerl.core.types import PolicyVersion, Rollout
from moerl.data.tasks import usable
from moerl.distributed.torchrun import TorchrunJob
from moerl.episodes.finished_episode import join
from moerl.episodes.turn import TurnInFlight, sampling_params
from moerl.launch.model_folders import with_tiny_model
from moerl.launch.run_context import RunContext, scoring_command, trainer_environment
from moerl.launch.trainer_check import check_trainer
from moerl.records.header_check import check as check_rollout
from moerl.runtime.process_tree import run_command
from moerl.runtime.run_dir import RunDir
from moerl.weight_sync.publisher import check_plan

_WORST = 24  # rows of the table of worst tokens
DTYPES: tuple[Precision, ...] = get_args(Precision)


def measure(
    config: Config,
    folder: Path,
    *,
    num_tokens: int = 0,
    dump: Path | None = None,
    variants: Sequence[str] = VARIANTS,
    dtypes: Sequence[Precision] = DTYPES,
) -> dict[str, Any]:
    """Generate (or read `dump`), score, compare.  Leaves records, job and scores in `folder`.

    Returns {"tokens", "model", "source", "engine_dtype", "sampling",
    "results": {dtype: {variant: metrics}}, "routing": {dtype: live agreement},
    "where": {dtype: {"attribution", "layers", "position", "lag", "worst"}}}; "where" only with all
    of VARIANTS.  Raises MoerlError.
    """
    context = _context(config, folder)
    if dump is None:
        rollouts, source = asyncio.run(_generate(context, num_tokens)), "fresh rollouts"
    else:
        rollouts, source = read_dump(dump, context.blobs(), context.model_shape()), dump.name
    job = score(context, rollouts, folder, variants=variants, dtypes=dtypes)
    scores = np.load(job.out)
    found = {"source": source} | _compare(context, scores, rollouts, variants, dtypes)
    if dump is not None:
        found["engine_dtype"] = "unknown precision"
    if set(VARIANTS) <= set(variants):
        newest = NEWEST if dump else max(span.version for r in rollouts for span in r.versions)
        tokens = _tokens(rollouts, newest.step)
        found["where"] = {dtype: _where(scores, dtype, tokens) for dtype in dtypes}
    return found


def score(
    context: RunContext,
    rollouts: Sequence[Rollout],
    folder: Path,
    *,
    variants: Sequence[str],
    dtypes: Sequence[Precision],
    model: Path | None = None,
    version: str = "",
) -> ScoreJob:
    """Run the scoring trainer over `rollouts` (or, with `version`, over their segments of it)."""
    records = folder / "rollouts.msgpack"
    records.write_bytes(encode_value(list(rollouts)))
    out = folder / f"scores{version and '-' + version}.npz"
    model = model or context.model_path
    job = make_job(
        context, records, out, variants=variants, dtypes=dtypes, model=model, version=version
    )
    job.save(folder / "job.json")
    log = folder / "score.log"
    ranks = TorchrunJob(
        scoring_command(context, folder / "job.json"), trainer_environment(context), log
    )
    if ranks.wait():
        raise TrainerError(f"scoring failed: {ranks.cause()}")
    return job


def make_job(
    context: RunContext,
    records: Path,
    out: Path,
    *,
    variants: Sequence[str],
    dtypes: Sequence[Precision],
    model: Path,
    version: str,
) -> ScoreJob:
    """The job that scores the rollouts in the file `records` as the trainer of a run would."""
    trainer = context.config.trainer
    return ScoreJob(
        model=str(model),
        rollouts=str(records),
        blob_dir=str(context.blob_dir),
        blob_node=context.node,
        out=str(out),
        variants=list(variants),
        dtypes=list(dtypes),
        ep=trainer.parallel.ep,
        platform=trainer.platform,
        transformer_impl=trainer.transformer_impl,
        dispatcher=trainer.dispatcher,
        max_tokens_per_microbatch=trainer.max_tokens_per_microbatch,
        version=version,
        megatron=dict(trainer.megatron),
        fp32_head=context.config.model.fp32_lm_head,
    )


def _context(config: Config, folder: Path) -> RunContext:
    if config.checkpoint.start:
        raise ConfigError(
            "checkpoint.start",
            config.checkpoint.start,
            "an audit scores model.path: make a folder of it with tools/megatron_to_hf.py",
        )
    run = RunDir(folder)
    run.create()
    config = with_tiny_model(config, run)
    hf_config = check_model(config)
    check_trainer(config, hf_config)
    return RunContext(
        config=config,
        run=run,
        model_path=Path(config.model.path),
        hf_config=hf_config,
        token=os.urandom(16).hex(),
        incarnation=0,
        node="local",
        blob_dir=folder / "blobs",
    )


async def _generate(context: RunContext, num_tokens: int) -> list[Rollout]:
    """Rollouts of fresh prompts from one engine, at least `num_tokens` sampled tokens."""
    _say("starting the engine")
    devices = visible_devices(placement(context.config).engines[0].devices)
    host = context.engine_host(0, context.config.engine.tp, devices=devices)
    await host.start(PolicyVersion(0, 0))
    try:
        await check_plan(context.config, 0, host.session)
        return await _sample(context, host, num_tokens)
    finally:
        await host.stop()


async def _sample(context: RunContext, host: Any, num_tokens: int) -> list[Rollout]:
    config, model, stream = context.config, context.model_shape(), context.prompts()
    prompts = usable(stream.prompt)
    sampling = {task.label: sampling_params(task.sampling, model) for task in entries_of(config)}
    rollouts: list[Rollout] = []
    sampled, count, responses = 0, 16, 0
    while sampled < num_tokens:
        turns = [
            TurnInFlight(f"{prompt.index}.{j}", prompt_ids, sampling[prompt.task], audit=False)
            for prompt in islice(prompts, count)
            for prompt_ids in [np.asarray(prompt.token_ids, np.int32)]
            for j in range(config.rollout.group_size)
        ]
        replies = await host.generate([turn.request() for turn in turns])
        for turn, reply in zip(turns, replies, strict=True):
            if isinstance(reply, RecordError):
                raise reply
            turn.add(reply)
            rollout = join(turn.name, [turn.sampled(turn.sampling)])
            check_rollout(rollout, model)
            rollouts.append(rollout)
            sampled += rollout.num_sampled
        if sampled * 10 // num_tokens > responses:
            responses = sampled * 10 // num_tokens
            _say(f"generated {sampled:,} of {num_tokens:,} tokens")
    if not sampled:
        raise EngineError("the engine sampled no token")
    return rollouts


def _tokens(rollouts: Sequence[Rollout], newest_step: int) -> dict[str, np.ndarray]:
    """Facts of every sampled token, in the order of the scores."""
    versions = [version for rollout in rollouts for version in rollout.version_of_tokens()]
    return {
        "rollout": np.concatenate([[r.rollout_id] * r.num_sampled for r in rollouts]),
        "token": np.concatenate([r.token_ids[r.loss_mask] for r in rollouts]),
        "position": np.concatenate([np.arange(r.num_sampled) for r in rollouts]),
        "lag": np.array([newest_step - version.step for version in versions]),
    }


def _where(scores: Any, dtype: str, tokens: dict[str, np.ndarray]) -> dict[str, Any]:
    """The gap of one precision by cause, layer, position and lag; and the worst tokens."""
    engine = scores["engine"].astype(np.float64)
    gaps = {name: scores[f"{dtype}/{name}"] - engine for name in VARIANTS}
    cause = cause_of_tokens(gaps)
    largest = np.maximum(np.abs(gaps["none"]), np.abs(gaps["both"]))
    by_both = np.argsort(-np.abs(gaps["both"]), kind="stable")[: _WORST // 2]
    by_any = np.argsort(-largest, kind="stable")[:_WORST]
    worst = dict.fromkeys([*by_both.tolist(), *by_any.tolist()])
    return {
        "attribution": attribute(gaps),
        "layers": _layers(scores, dtype),
        "position": by_position(tokens["position"], gaps),
        "lag": by_lag(tokens["lag"], gaps),
        "worst": [
            {
                "rollout": str(tokens["rollout"][index]),
                "position": int(tokens["position"][index]),
                "token": int(tokens["token"][index]),
                "lag": int(tokens["lag"][index]),
                "kept": int(scores["kept"][index]),
                "engine": float(engine[index]),
                "gaps": {name: float(d[index]) for name, d in gaps.items()},
                "moved": bool(scores[f"{dtype}/moved"][index]),
                "cause": CAUSES[cause[index]],
            }
            for index in list(worst)[:_WORST]
        ],
    }


def _layers(scores: Any, dtype: str) -> list[dict[str, Any]]:
    rows = zip(
        scores[f"{dtype}/layers"].tolist(),
        scores[f"{dtype}/layer_pairs"].tolist(),
        scores[f"{dtype}/layer_margin"].tolist(),
        strict=True,
    )
    return [
        {
            "layer": layer,
            "agree_frac": agree / pairs,
            "same_input_frac": 1 - roots / clean if clean else 1.0,
            "clean": clean,
            "margin": margin,
        }
        for layer, (pairs, agree, clean, roots), margin in rows
    ]


def _compare(
    context: RunContext,
    scores: Any,
    rollouts: Sequence[Rollout],
    variants: Sequence[str],
    dtypes: Sequence[Precision],
) -> dict[str, Any]:
    engine = torch.from_numpy(scores["engine"])
    assert len(engine) == sum(rollout.num_sampled for rollout in rollouts), "tokens are in order"
    results: dict[str, dict[str, dict[str, float]]] = {}
    routing: dict[str, dict[str, float]] = {}
    for dtype in dtypes:
        results[dtype] = {}
        for variant in variants:
            trainer = torch.from_numpy(scores[f"{dtype}/{variant}"])
            sums = MismatchSums.of(trainer, engine, torch.zeros(len(engine), dtype=torch.long))
            results[dtype][variant] = {
                name.removeprefix("mismatch/"): value
                for name, value in sums.metrics().items()
                if "/lag" not in name
            }
        margins, clean = scores[f"{dtype}/root_margin"], float(scores[f"{dtype}/slots_clean"])
        routing[dtype] = {
            "live_agreement": float(scores[f"{dtype}/slots_agree"] / scores[f"{dtype}/slots"]),
            "live_token_agreement": float(
                scores[f"{dtype}/tokens_agree"] / scores[f"{dtype}/tokens"]
            ),
            "slots": float(scores[f"{dtype}/slots"]),
            "same_input_agreement": 1 - len(margins) / max(clean, 1.0),
            "root_margin_max": float(margins.max()) if len(margins) else 0.0,
        }
        if f"{dtype}/executed" in scores:
            routing[dtype]["executed"] = float(scores[f"{dtype}/executed"])
    head = " and fp32 head" if context.config.model.fp32_lm_head else ""
    return {
        "model": str(context.model_path),
        "tokens": len(engine),
        "engine_dtype": context.config.engine.dtype + head,
        "sampling": {e.label: asdict(e.sampling) for e in entries_of(context.config)}
        if context.config.tasks
        else asdict(context.config.sampling),
        "results": results,
        "routing": routing,
    }


def show(found: dict[str, Any]) -> None:
    """Print one row per precision and variant."""
    table = Table(
        title=f"trainer against engine ({found['engine_dtype']}), {found['source']}, "
        f"{found['tokens']:,} tokens"
    )
    for column in ("trainer", "replay", "k3", "mean |d|", "max |d|", "E\\[ratio]", "se", "F(2)"):
        table.add_column(column, justify="left" if column in ("trainer", "replay") else "right")
    table.add_column("live routing", justify="right")
    for dtype, variants in found["results"].items():
        routing = found["routing"][dtype]
        agreement = (
            f"{100 * routing['live_agreement']:.3f}% ({100 * routing['same_input_agreement']:.3f}%)"
        )
        for variant, m in variants.items():
            table.add_row(
                dtype,
                variant,
                f"{m['k3']:.2e}",
                f"{m['abs_dlogp_mean']:.2e}",
                f"{m['abs_dlogp_max']:.2e}",
                f"{m['ratio_mean']:.5f}",
                f"{m.get('ratio_se', 0.0):.1e}",
                f"{m['extreme_frac_2']:.1e}",
                agreement if variant == "none" else "",
            )
        table.add_section()
    Console(width=max(100, Console().width)).print(table)
    for dtype, where in found.get("where", {}).items():
        shares = where["attribution"]["abs_dlogp_mean"]
        parts = ", ".join(f"{name} {shares[name]:.2e}" for name in (*CAUSES, "interaction"))
        print(f"{dtype}: mean |d| {shares['total']:.2e} = {parts}")
    print(
        "d = trainer - engine log-probability of each sampled token, in nats. k3 estimates\n"
        "KL(engine, trainer); E[ratio] is 1 when both score the same distribution; F(2) is the\n"
        "share of tokens whose ratio is beyond 2 either way; live routing is the share of\n"
        "(token, layer) pairs where the trainer's own router picks the recorded experts (in\n"
        "brackets: of the pairs that no earlier difference in the same rollout has changed)."
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    request = json.loads(sys.argv[1])
    config = resolve(load_config(request["recipe"], request["overrides"]))
    if request["checkpoint"]:
        config = replace(config, model=replace(config.model, path=request["checkpoint"]))
    folder = Path(request["keep"] or Path(request["scratch"]) / "mismatch")
    check(config)
    dump = Path(request["records"]) if request["records"] else None
    found = measure(config, folder, num_tokens=request["tokens"], dump=dump)
    page = write_page(Path(request["page"]), found)
    if request["json"]:
        print(json.dumps(found, indent=2))
    else:
        show(found)
        print(f"page: {page}")


if __name__ == "__main__":
    sys.exit(run_command(main))
