"""A resumed run against a whole one: the same prompts equally often, one learning-rate curve, one
TensorBoard curve.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from moerl.core.serialization import decode_value
from moerl.core.types import EpisodeGroup
from tests.helpers.train_runs import Run, start

PROMPTS, STEPS, FIRST, EVERY, GROUPS = 64, 16, 12, 4, 8
SETTINGS = [
    f"rollout.groups_per_step={GROUPS}",  # two epochs in all
    "rollout.group_size=2",
    f"checkpoint.every={EVERY}",
    "observe.engine_alone_s=0",
    "observe.tensorboard=true",
    "evaluation.every=0",
    "task.name=jsonl",
    "task.reward=exact_match",
    "sampling.max_new_tokens=2",
    "trainer.optimizer.lr=0.016",
    "trainer.optimizer.decay_style=linear",
    "trainer.optimizer.min_lr=0",
    "trainer.optimizer.warmup_steps=0",
]


def trained(run: Run) -> Counter[str]:
    """How often the surviving history has trained each prompt."""
    return Counter(group.prompt.text for _, group in run.trained.groups(run.rows()))


def tensorboard_rates(run: Run) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.dir.tensorboard), size_guidance={"tensors": 0})
    events.Reload()
    found = events.Tensors("loss/lr")
    return [(event.step, event.tensor_proto.float_val[0]) for event in found]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_resumed_run_trains_what_a_whole_run_trains(tmp_path: Path) -> None:
    data = tmp_path / "numbered.jsonl"
    lines = [{"prompt": f"{number}=", "answer": "1"} for number in range(PROMPTS)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = [*SETTINGS, f"task.path={data}"]
    whole = start(
        tmp_path, "quickstart-smoke", *settings, f"run.steps={STEPS}", name="whole", copies=True
    )
    assert whole.finish() == 0, whole.text()
    run = start(
        tmp_path, "quickstart-smoke", *settings, f"run.steps={FIRST}", name="cut", copies=True
    )
    saved = EVERY
    try:
        run.wait_for(
            lambda: len(run.rows()) >= saved + 2 and run.dir.latest_checkpoint() is not None
        )
        os.kill(run.pids()["root"], signal.SIGKILL)
        run.process.wait(60)
    finally:
        run.end()
    latest, rows = run.dir.latest_checkpoint(), len(run.rows())
    assert latest is not None
    saved = latest[0]
    print(f"killed after {rows} steps; the checkpoint holds {saved}")
    run = start(tmp_path, "--resume", str(run.dir.root), f"run.steps={STEPS}", copies=True)
    assert run.finish() == 0, run.text()

    assert set(trained(whole).values()) == {STEPS * GROUPS // PROMPTS}
    assert trained(run) == trained(whole)
    files = sorted((run.trained.folder / "0").glob("step-*.msgpack"))
    thrown_away = [file for file in files if int(file.stem.removeprefix("step-")) >= saved]
    assert thrown_away, "control: steps were thrown away"
    every = trained(run) + Counter(
        group.prompt.text
        for file in thrown_away
        for group in decode_value(file.read_bytes(), list[EpisodeGroup])
    )
    assert every != trained(whole), "control: with their prompts the counts differ"

    rates = {name: [row["loss/lr"] for row in r.rows()] for name, r in (("w", whole), ("c", run))}
    assert rates["w"] == pytest.approx([0.016 * (1 - (s + 1) / STEPS) for s in range(STEPS)])
    assert rates["c"][saved:] == pytest.approx(rates["w"][saved:])
    assert rates["c"][:saved] == pytest.approx(
        [0.016 * (1 - (s + 1) / FIRST) for s in range(saved)]
    ), "control: the steps before had the decay of the shorter run"
    shown = tensorboard_rates(run)
    assert [step for step, _ in shown] == list(range(STEPS))
    assert [rate for _, rate in shown] == pytest.approx(rates["c"])
