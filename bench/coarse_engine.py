"""What score centering does to learning when the engine's weights are coarse on purpose.

    python bench/coarse_engine.py --out runs/coarse              (stopped? the same line goes on)

The quickstart's task at an exact lag of 0, with objectives that weigh a token in three ways: not at
all, bounded, masked.  Each trains against an exact engine, against one whose weights are rounded
(bench/coarse_trainer.py), and against that one with score centering.  A seed makes the initial
weights and the prompts; one engine serves all runs, and it records the log-probabilities for all of
them.  Writes the table of bench/learning_curves.py into OUT/table.txt.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from learning_curves import HEAD, Series, load, missing, table, train_all

COARSE = Path(__file__).with_name("coarse_trainer.py")
ON, OFF = "algorithm.centering=true", "algorithm.centering=false"
WIDE = ("algorithm.clip_low=1", "algorithm.clip_high=4")
OBJECTIVES = {
    "reinforce": ("algorithm.objective=reinforce",),
    "cispo": ("algorithm.objective=cispo", *WIDE),
    "ppo_clip": (),
}
ARMS = {"exact": (OFF, None), "coarse": (OFF, COARSE), "coarse, centred": (ON, COARSE)}
SERIES = [
    Series(
        f"{objective}, {arm}",
        "quickstart",
        0,
        (*settings, centering),
        f"{objective}-{arm.replace(', ', '-')}",
        script,
    )
    for objective, settings in OBJECTIVES.items()
    for arm, (centering, script) in ARMS.items()
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/coarse"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--objectives", nargs="*", default=list(OBJECTIVES), choices=OBJECTIVES)
    parser.add_argument("--most", type=int, default=0, help="runs of this call; 0 = all")
    options = parser.parse_args()
    out = options.out.resolve()
    series = [one for one in SERIES if one.name.split(",")[0] in options.objectives]
    todo = missing(out, series, options.seeds, options.steps)
    todo = todo[: options.most] if options.most else todo
    # the engine is that of the first run, and must record for those that need it
    bed = Series("engine", "quickstart", 0, (ON,), "engine")
    train_all(out, todo, options.steps, bed)
    found = load(out, options.seeds, options.steps, series)
    lines = ["  ".join(cell.ljust(26) for cell in row) for row in (HEAD, *table(found))]
    (out / "table.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
