"""Seconds to a reward: `moerl train quickstart` against TRL's GRPOTrainer, same model file.

    python bench/against_trl.py [--rounds 3] [--rewards 0.31 0.5] [--json FILE]

Both train the same folder on prompts of the same task with the same reward, samples per step,
sampling, learning rate and warm-up, each with its own objective, optimizer settings and defaults.
TRL runs as a user of one machine would run it: one process, transformers' generate, no lag.  moerl
runs as shipped: engine, controller and trainer, lag up to 4.  It needs the environment `reference`
(tools/test_env.sh reference).

In each round both have a turn, in rotating order.  Times count from each side's first step: what a
start takes is printed by itself.  Figures: seconds per step, and seconds until the mean reward of
ten steps reaches each of --rewards, moerl over TRL; a level that a side has not reached in 180 s
counts as missed.  Ratios are times, so below 1 moerl is faster.  Twenty minutes for three rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from figures import ROOT, Figure, of_ratios, report, result

from moerl.config import load_config
from moerl.config.schema import Config
from moerl.data.tasks import SortDigits
from moerl.data.tiny_model import make_tiny_model
from moerl.observe.metrics import read_rows
from moerl.runtime.run_dir import RunDir

TRL_PYTHON = ROOT / "build/reference/bin/python"
WINDOW = 10  # steps over which a reward is averaged
MOST = 1.5  # times TRL's time, the aim
RUN_S = 1800.0
REACHED_S = 180.0  # a level that takes longer is not reached


@dataclass(frozen=True, slots=True)
class Curve:
    """Of one run: seconds from the first step on, and mean reward, by step."""

    seconds: list[float]
    rewards: list[float]
    whole_s: float  # of the command, start and end included

    @property
    def step_s(self) -> float:
        gaps = [b - a for a, b in zip(self.seconds, self.seconds[1:], strict=False)]
        return statistics.median(gaps)

    def until(self, reward: float) -> float:
        """Seconds until the mean of WINDOW steps reaches the reward; infinite after REACHED_S."""
        for step in range(WINDOW, len(self.rewards) + 1):
            if self.seconds[step - 1] > REACHED_S:
                break
            if statistics.fmean(self.rewards[step - WINDOW : step]) >= reward:
                return self.seconds[step - 1]
        return math.inf


def with_trl(work: Path, config: Config, model: Path, seed: int, steps: int) -> Curve:
    prompts, out, job = (work / f"{name}-{seed}" for name in ("prompts", "trl.jsonl", "job.json"))
    source, rollout = SortDigits(config.task, seed), config.rollout
    items = [source.item(index) for index in range(steps * rollout.groups_per_step)]
    rows = [json.dumps({"prompt": item.prompt, "answer": item.answer}) for item in items]
    prompts.write_text("\n".join(rows), encoding="utf-8")
    sampling, optimizer = config.sampling, config.trainer.optimizer
    wanted = {
        "model": str(model),
        "prompts": str(prompts),
        "out": str(out),
        "steps": steps,
        "groups": rollout.groups_per_step,
        "group_size": rollout.group_size,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "lr": optimizer.lr,
        "warmup": optimizer.warmup_steps,
        "seed": seed,
    }
    job.write_text(json.dumps(wanted), encoding="utf-8")
    out.unlink(missing_ok=True)
    whole_s = command([str(TRL_PYTHON), "bench/trl_grpo.py", str(job)], work / "trl.log")
    rows_of = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return Curve([row["seconds"] for row in rows_of], [row["reward"] for row in rows_of], whole_s)


def with_moerl(work: Path, model: Path, seed: int, steps: int) -> Curve:
    run = RunDir(work / f"moerl-{seed}")
    shutil.rmtree(run.root, ignore_errors=True)
    settings = [f"run.steps={steps}", f"run.seed={seed}", f"run.root={work}", f"model.path={model}"]
    words = ["train", "quickstart", *settings, "--run", run.root.name]
    whole_s = command([sys.executable, "-m", "moerl", *words], work / "moerl.log")
    rows = [row for row in read_rows(run.metrics) if "reward/mean" in row]
    begin = rows[0]["time_s"] - rows[0]["perf/step_s"]
    seconds = [float(row["time_s"] - begin) for row in rows]
    return Curve(seconds, [float(row["reward/mean"]) for row in rows], whole_s)


def command(words: list[str], log: Path) -> float:
    """Run it, its output into a file; seconds."""
    begin = time.monotonic()
    with log.open("a") as file:
        done = subprocess.run(
            words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=RUN_S, check=False
        )
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}; see {log}")
    return time.monotonic() - begin


def play(work: Path, options: argparse.Namespace) -> list[tuple[Curve, Curve]]:
    """(moerl, TRL) of each round; round n has seed n."""
    config, rounds = load_config("quickstart"), []
    for seed in range(options.rounds):
        model = work / f"model-{seed}"
        make_tiny_model(model, config.model.tiny, seed)
        found: dict[str, Curve] = {}
        for name in ("moerl", "trl") if seed % 2 else ("trl", "moerl"):
            if name == "moerl":
                found[name] = with_moerl(work, model, seed, options.steps)
            else:
                found[name] = with_trl(work, config, model, seed, 2 * options.steps)
        for name, curve in found.items():
            last = statistics.fmean(curve.rewards[-WINDOW:])
            start = curve.whole_s - curve.seconds[-1]
            reached = [f"{curve.until(level):.1f} s to {level:g}" for level in options.rewards]
            print(
                f"round {seed} {name:5}: {curve.step_s:.2f} s a step, {', '.join(reached)}, "
                f"{last:.2f} after {len(curve.rewards)} steps, {start:.0f} s around them",
                flush=True,
            )
        rounds.append((found["moerl"], found["trl"]))
    return rounds


def figures_of(rounds: list[tuple[Curve, Curve]], rewards: list[float]) -> list[Figure]:
    made = [of_ratios("time of a step, moerl / TRL", [a.step_s / b.step_s for a, b in rounds])]
    for level in rewards:
        reached = [(a.until(level), b.until(level)) for a, b in rounds]
        both = [a / b for a, b in reached if math.isfinite(a) and math.isfinite(b)]
        if both:
            what = f"time to a reward of {level:g}, moerl / TRL"
            made.append(of_ratios(what, both, MOST, at_most=True))
    return made


def missed(rounds: list[tuple[Curve, Curve]], level: float) -> dict[str, int]:
    """Rounds in which each side did not reach the reward in time."""
    sides = zip(*rounds, strict=True)
    found = (sum(math.isinf(curve.until(level)) for curve in side) for side in sides)
    return dict(zip(("moerl", "TRL"), found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=260, help="of moerl; TRL makes twice as many")
    parser.add_argument("--rewards", type=float, nargs="+", default=[0.31, 0.5])
    parser.add_argument("--json", type=Path, help="write the figures for tools/results")
    options = parser.parse_args()
    if not TRL_PYTHON.exists():
        sys.exit(f"{TRL_PYTHON} is missing: tools/test_env.sh reference makes it")
    work = Path(tempfile.mkdtemp(prefix="moerl-trl-"))
    try:
        rounds = play(work, options)
    except SystemExit:
        print(f"logs are in {work}", file=sys.stderr)
        raise
    late = {f"{level:g}": missed(rounds, level) for level in options.rewards}
    print(f"rounds that did not reach a reward in {REACHED_S:g} s: {late}")
    details = {"steps": options.steps, "not reached": late}
    report(result(figures_of(rounds, options.rewards), details), options.json)
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
