"""Does a trained process reward model teach faster than the outcome reward?

    python bench/process_reward_model.py --out runs/prm       (stopped? the same line goes on)

The answer to "4=" is "5 6 7 8 ".  Both arms begin as one model of a seed that writes four digits
by chance, so one answer in ten thousand earns the outcome reward, exact_match.  The process reward
model is a tiny model of other random weights: `moerl sft sft.value_head=bce` trains it on random
digits with labels, and the arm gets its probability that each digit is right, as the steps end
(recipe process-reward-model, with answers of three digits).  Neither arm sees the other's reward.

Printed: the share of right answers over the last quarter of the steps, by arm and seed, and the
mean difference of paired seeds with its 95 % interval (Student's t).  Exit status 0: it is above 0.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from pathlib import Path

from figures import ROOT, machine
from learning_arms import first_model, moerl

from moerl.observe.metrics import read_rows

STEPS, LINES, DIGITS = 80, 4000, 4
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}
ARMS = {
    "process": [],
    "outcome": [
        "task.rewards=[{name: right, function: exact_match}]",
        "ref_models.placement=trainer",
    ],
}
SMALL_STEPS = ["rollout.groups_per_step=64", "trainer.optimizer={lr: 2.0e-3, min_lr: 2.0e-3}"]


def write_data(out: Path, seed: int) -> None:
    """Questions; answers of random digits for the start; digits with labels for the model."""
    rng = random.Random(seed)
    asked = [{"prompt": f"{digit}=", "answer": right(digit)} for digit in range(10)]
    answers, steps = [], []
    for _ in range(LINES):
        digit, said = rng.randrange(10), [rng.randrange(10) for _ in range(DIGITS)]
        text = "".join(f"{one} " for one in said)
        answers.append({"prompt": f"{digit}=", "answer": text})
        said = [(digit + k) % 10 if rng.random() < 0.5 else one for k, one in enumerate(said, 1)]
        labels = [float(one == (digit + k) % 10) for k, one in enumerate(said, 1)]
        parts = [[f"{one} ", label] for one, label in zip(said, labels, strict=True)]
        steps.append({"prompt": f"{digit}=", "answer": text, "steps": [*parts, [" ", None]]})
    for name, rows in (("asked", asked), ("answers", answers), ("steps", steps)):
        (out / f"{name}-{seed}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def right(digit: int) -> str:
    return "".join(f"{(digit + k) % 10} " for k in range(1, DIGITS + 1))


def play(out: Path, arm: str, seed: int) -> dict[str, float]:
    write_data(out, seed)
    sft = ["sft", "quickstart-smoke", "task.name=jsonl", "task.reward=exact_match", *SMALL_STEPS]
    answers, labels = (f"task.path={out}/{name}-{seed}.jsonl" for name in ("answers", "steps"))
    start, _ = first_model(out, seed, [*sft, answers, "run.steps=40"])
    judge = out / f"judge-{seed}"
    judge.mkdir(exist_ok=True)
    head = [*sft, labels, "sft.value_head=bce", "run.steps=200"]
    model, _ = first_model(judge, 100 + seed, head)  # of other random weights than the policy
    settings = [f"model.path={start}", f"run.steps={STEPS}", *ARMS[arm]]
    settings += [f"task.path={out}/asked-{seed}.jsonl", f"sampling.max_new_tokens={2 * DIGITS}"]
    if arm == "process":
        term = f"{{name: steps, where: model, model: {model}, unit: step, separator: ' '}}"
        outcome = "{name: right, function: exact_match, weight: 0}"
        settings.append(f"task.rewards=[{outcome}, {term}]")
    name = f"{arm}-{seed}"
    names = [f"run.root={out}", f"run.seed={seed}", "--run", name]
    seconds = moerl(out, ["train", "process-reward-model", *settings, *names])
    metric = "reward/right" if arm == "process" else "reward/mean"
    shares = [row[metric] for row in read_rows(out / name / "metrics.jsonl")]
    quarter = len(shares) // 4
    first, last = statistics.fmean(shares[:quarter]), statistics.fmean(shares[-quarter:])
    return {"first": first, "last": last, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs/prm")
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for seed in range(options.seeds):
        for arm in ARMS:
            path = out / f"{arm}-{seed}.json"
            if not path.exists():
                path.write_text(json.dumps(play(out, arm, seed)) + "\n")
            found[arm].append(json.loads(path.read_text()))
            shown = "  ".join(f"{name} {value:.3f}" for name, value in found[arm][-1].items())
            print(f"{arm:8} seed {seed}  {shown}", flush=True)
    pairs = zip(found["process"], found["outcome"], strict=True)
    gaps = [a["last"] - b["last"] for a, b in pairs]
    mean, reach = statistics.fmean(gaps), math.inf
    if len(gaps) > 1:
        reach = T_95[len(gaps) - 1] * statistics.stdev(gaps) / math.sqrt(len(gaps))
    interval = f"{mean - reach:+.3f} to {mean + reach:+.3f}"
    print(f"process - outcome, last quarter: {mean:+.3f}, 95 % {interval}")
    print(machine())
    (out / "results.json").write_text(
        json.dumps({"machine": machine(), "runs": found, "gaps": gaps, "reach": reach}, indent=1)
    )
    sys.exit(0 if mean > reach else 1)


if __name__ == "__main__":
    main()
