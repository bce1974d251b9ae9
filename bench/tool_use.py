"""Does a policy learn to use a tool?  The recipe tool-use against two controls, with several seeds.

    python bench/tool_use.py --out runs/tool-use-bench               (stopped? the same line again)
    python bench/tool_use.py --out runs/tool-use-bench --runs 1      (one run, then the table)

Each seed makes a first model by `moerl sft tool-use-start`; from it three runs of `moerl train
tool-use` begin: with the calculator, with a learning rate of 0, and with a calculator that answers
0 to everything.  The held-out reward is the mean over the evaluations of the first, or the last,
tenth of the steps (`learning_arms.py`).  Required, over the seeds: with the tool, last above first,
and last above the last of the rate 0, by 5 standard errors; without the tool, last above first by
less than 2.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from learning_arms import (
    IDLES,
    STILL,
    Found,
    HeldOut,
    Verdicts,
    arguments,
    first_model,
    learns,
    rise,
    run_arms,
    train,
)

ARMS = {
    "tool": [],
    "rate 0": [STILL],
    "no tool": ["task.environment=bench.no_result:no_result"],
}


def play(start: Sequence[str], settings: Sequence[str], out: Path, arm: str, seed: int) -> HeldOut:
    model, warm_s = first_model(out, seed, ["sft", "tool-use-start", *start])
    made = ["tool-use", *ARMS[arm], *settings, f"model.path={model}"]
    return train(out, arm, seed, made, warm_s)


def verdicts(found: Found) -> Verdicts:
    """Each requirement that the runs so far can answer."""
    said = learns("tool", found)
    if blind := found["no tool"]:
        said["no tool: last tenth above first"] = rise(blind), rise(blind).errors < IDLES
    return said


def main() -> None:
    parser = arguments(__doc__, "runs/tool-use-bench", list(ARMS))
    parser.add_argument("--start", nargs="*", default=[], help="settings of the warm start")
    options = parser.parse_args()
    once = partial(play, options.start, options.settings)
    sys.exit(0 if run_arms(options, list(ARMS), once, verdicts) else 1)


if __name__ == "__main__":
    main()
