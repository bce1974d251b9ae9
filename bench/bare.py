"""What moerl costs: requests through bare SGLang and batches through bare Megatron-core, and ours.

    python bench/bare.py [--part engine|trainer] [--recipe quickstart] [--model DIR] [--tokens N]
        [--rounds 20] [--quick] [--json FILE]

Engine: one batch of requests (prompts, groups and sampling of the recipe, `ignore_eos`) goes to
    bare               SGLang, which records nothing
    bare, records on   SGLang with its own routes and masks, as JSON
    moerl's server     SGLang with our plug-in, which writes them to files, asked in the same way
    whole path         a run's processes: the controller asks the engine host, which checks and
                       seals; groups are scored and journaled; the plan is in the trainer's hands
The first three get all requests in one HTTP request and only parse the answer.  All servers have
the same arguments and, on a plain CPU, the hooks without which SGLang does not run there
(bench/bare_server.py).  Only weights are not published.

Trainer: one batch of random tokens with sealed records through a step of
    bare               Megatron-core: the same GPTModel, tensors packed once, cross entropy over the
                       vocabulary, forward_backward_func, the same optimizer
    moerl              our step: reads, checks and packs the records, replays routes and masks,
                       objective, metrics, optimizer

In each round every arm has a turn, in rotating order, so that a noisy machine hits all alike, and
ratios are taken within a round: moerl / bare, in tokens per second and in tokens per second of CPU
of all processes concerned; the second depends less on what else runs.  The whole path decodes as
the bare server does, so 1 bounds its ratio to the one without records.  The trainer's head projects
tokens that are trained onto their masks only: its ratio may be above 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import one_rank  # noqa: F401  it sets what torch reads at its import
from figures import Figure, of_ratios, report, result

from moerl.config import load_config
from moerl.launch.run_context import RunContext
from moerl.launch.train import prepare, set_ray_environment
from moerl.runtime.process_tree import end_descendants
from moerl.runtime.reaper import become_subreaper
from moerl.runtime.run_dir import RunDir

ENGINE_RECORDS_AIM, ENGINE_AIM, TRAINER_AIM = 0.97, 0.93, 0.97
SETTINGS = (
    "run.console=quiet",
    "run.steps=1000000",
    "sampling.ignore_eos=true",
    "rollout.buffer_depth=0",  # a batch begins when this bench says so
    "rollout.max_lag=1000000",  # and no version follows the first
    "trainer.parallel={dp: 1, ep: 1}",
    "evaluation.every=0",
    "checkpoint.every=0",
    "observe.full_entropy=0",
    "engine.start_timeout_s=1800",  # three servers start on a machine that others use
)


def main() -> None:
    asked = arguments()
    become_subreaper()
    folder = Path(tempfile.mkdtemp(prefix="moerl-bench-"))
    found: list[Figure] = []
    details: dict[str, object] = {}
    try:
        plan = make_plan(asked, folder)
        if asked.part in ("engine", "both"):
            engine_part(plan, asked, folder, found, details)
        if asked.part in ("trainer", "both"):
            trainer_part(plan, asked, found, details)
    finally:
        end_descendants(grace_s=2.0)
        shutil.rmtree(folder, ignore_errors=True)
    report(result(found, details), asked.json)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help="of the recipe")
    parser.add_argument("--part", choices=("engine", "trainer", "both"), default="both")
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--model", type=Path, help="model folder; default: the recipe's")
    parser.add_argument("--tokens", type=int, help="sampled tokens per request; default: recipe's")
    parser.add_argument("--groups", type=int, help="groups per round; default: the recipe's")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    asked = parser.parse_args()
    if asked.quick:
        asked.rounds = 3
    return asked


def make_plan(asked: argparse.Namespace, folder: Path) -> RunContext:
    settings = [*SETTINGS, f"run.root={folder}", "run.name=bare"]
    if asked.model is not None:
        settings.append(f"model.path={asked.model.resolve()}")
    if asked.tokens is not None:
        settings.append(f"sampling.max_new_tokens={asked.tokens}")
    if asked.groups is not None:
        settings.append(f"rollout.groups_per_step={asked.groups}")
    config = load_config(asked.recipe, [*settings, *asked.settings])
    set_ray_environment(config)
    run = RunDir(folder / "bare")
    run.create()
    return prepare(config, run, resume=False)


def engine_part(
    plan: RunContext,
    asked: argparse.Namespace,
    folder: Path,
    found: list[Figure],
    details: dict[str, object],
) -> None:
    import bare_engine as engine  # it imports Ray, whose settings are made by now

    turns = asyncio.run(engine.measure(plan, asked.rounds, folder))
    rates = {name: [turn.rate for turn in each] for name, each in turns.items()}
    cpu = {name: [turn.cpu_rate for turn in each] for name, each in turns.items()}
    pairs = (
        (engine.PATH, engine.RECORDS, ENGINE_RECORDS_AIM),
        (engine.PATH, engine.BARE, ENGINE_AIM),
        (engine.DIRECT, engine.RECORDS, None),
    )
    what = f"{described(plan)}: tokens/s"
    for ours, theirs, aim in pairs:
        found.append(of_ratios(f"{what}, {ours} / {theirs}", over(rates, ours, theirs), aim))
        found.append(of_ratios(f"{what} of CPU, {ours} / {theirs}", over(cpu, ours, theirs)))
    details["engine tokens/s"] = medians(rates)
    details["engine tokens/s of CPU"] = medians(cpu)


def trainer_part(
    plan: RunContext, asked: argparse.Namespace, found: list[Figure], details: dict[str, object]
) -> None:
    import bare_trainer as trainer  # it imports torch

    seconds, batch = trainer.measure(plan, asked.rounds)
    tokens = sum(row.num_tokens - 1 for row in batch.rollouts())
    wall, cpu = (
        {name: [tokens / pair[kind] for pair in each] for name, each in seconds.items()}
        for kind in (0, 1)
    )
    what = f"{described(plan)}: trained tokens/s"
    ours, theirs = trainer.OURS, trainer.BARE
    found.append(of_ratios(f"{what}, {ours} / {theirs}", over(wall, ours, theirs), TRAINER_AIM))
    found.append(of_ratios(f"{what} of CPU, {ours} / {theirs}", over(cpu, ours, theirs)))
    details["trainer tokens/s"] = medians(wall)
    details["trainer tokens/s of CPU"] = medians(cpu)
    details["trainer tokens"] = tokens


def described(plan: RunContext) -> str:
    """Model and requests in words."""
    rollout, spec = plan.config.rollout, plan.spec()
    requests = rollout.groups_per_step * rollout.group_size
    tokens = plan.config.sampling.max_new_tokens
    kind = f"{spec.layers} layers, hidden {spec.hidden}"
    return f"{spec.family} ({kind}), {requests} requests x {tokens} tokens"


def over(values: Mapping[str, Sequence[float]], ours: str, theirs: str) -> list[float]:
    return [a / b for a, b in zip(values[ours], values[theirs], strict=True)]


def medians(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: round(statistics.median(each), 1) for name, each in values.items()}


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # Ray's exit hooks would wait for processes that have ended
