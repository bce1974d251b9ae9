"""What is printed: one line per step, a panel that fits, nothing that moves cursors."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console as RichConsole

from moerl.core.errors import ConfigError
from moerl.observe import console as console_module
from moerl.observe.console import BLOCKS, Console, clock, sparkline

ROW = {
    "version": "0.3",
    "reward/mean": 0.5,
    "mismatch/k3": 1.2e-11,
    "mismatch/abs_dlogp_max": 3e-6,
    "async/lag_mean": 0.75,
    "async/lag_max": 2.0,
    "async/buffer_depth": 12.0,
    "async/engine_idle_frac": 0.125,
    "async/trainer_wait_frac": 0.05,
    "perf/rollout_tokens_per_s": 2450.0,
    "perf/train_tokens_per_s": 3100.0,
    "routing/replay_cover_frac": 1.0,
    "keep/cover_frac": 1.0,
}


def row(step: int, **more: float) -> dict[str, object]:
    return {"step": step, "time_s": 100.0 + 2 * step} | ROW | more


class Out(io.TextIOWrapper):
    """A text stream with an encoding of its own, as a terminal or a log file has."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)

    @property
    def text(self) -> str:
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]


def test_lines_mode_prints_one_line_per_step() -> None:
    out = Out()
    console = Console("lines", 10, out)
    console.status({"async/buffer_depth": 1.0})
    for step in range(3):
        console.step(row(step))
    console.close({"reward": "0.1 -> 0.5"})
    lines = out.text.splitlines()
    assert len(lines) == 4
    assert lines[2] == (
        "step 3/10  reward 0.500  k3 1.2e-11  max|dlogp| 3.0e-06  lag 0.8/2  "
        "tok/s engine 2,450 trainer 3,100  buffer 12  idle engine 12% trainer 5%  "
        "cover 1/1  eta 0:14"
    )
    assert lines[3] == "reward  0.1 -> 0.5"


def test_a_step_without_metrics_shows_dashes() -> None:
    out = Out()
    Console("lines", 10, out).step({"step": 0})
    assert out.text == (
        "step 1/10  reward -  k3 -  max|dlogp| -  lag -/-  tok/s engine - trainer -  buffer -  "
        "idle engine - trainer -  cover -/-\n"
    )


def test_restored_steps_count_but_are_not_printed() -> None:
    out = Out()
    console = Console("lines", 10, out)
    console.restore(row(step) for step in range(5))
    console.step(row(5) | {"time_s": 10_000.0})  # the pause before the resume
    assert len(out.text.splitlines()) == 1
    assert "step 6/10" in out.text
    assert "eta 0:08" in out.text


def test_start_up_shows_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    out = Out()
    console = Console("lines", 10, out)
    console.wait("engine 0")
    console.status({})
    now[0] = 7.0
    console.status({})
    console.status({})
    now[0] = 9.5
    console.ready("engine 0")
    console.ready("engine 0")  # known already
    assert out.text.splitlines() == [
        "waiting for engine 0",
        "still waiting for engine 0 (7 s)",
        "engine 0 ready after 9.5 s",
    ]


def test_refused_records_are_shown_with_their_reason_and_not_added_up() -> None:
    out = Out()
    console = Console("lines", 10, out)
    console.step(row(0, **{"refused/mask_rows": 2.0, "refused/dtype": 0.0}))
    console.step(row(1, **{"refused/mask_rows": 3.0}))  # the row counts since the start
    assert "refused 3 (mask_rows 3)" in out.text.splitlines()[1]


def test_foreign_text_stays_on_one_line_without_control_characters() -> None:
    for mode in ("lines", "panel"):
        out = Out("ascii")
        console = Console(mode, 10, out)
        console.event("na\u00efve \x1b]0;title\x07 [bold]x[/bold]\r\nnext \ud800")
        console.close({"\x1b[2J": "\u4e2d"})
        assert "\x1b]0" not in out.text
        assert "\x07" not in out.text
        assert "\x1b[2J\n" not in out.text
        assert "na?ve ]0;title [bold]x[/bold] next" in out.text


def test_quiet_prints_nothing() -> None:
    out = Out()
    console = Console("quiet", 10, out)
    console.wait("engine 0")
    console.ready("engine 0")
    console.step(row(0))
    console.event("published")
    console.close({"reward": 1})
    assert out.text == ""


def test_auto_is_lines_where_there_is_no_terminal() -> None:
    out = Out()
    console = Console("auto", 10, out)
    console.step(row(0))
    console.close()
    assert out.text.startswith("step 1/10")
    assert "\x1b" not in out.text


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.console = 'loud'.*auto, panel, lines, quiet"):
        Console("loud", 10, Out())


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [20, 44, 80, 200])
def test_panel_fits_every_terminal(
    monkeypatch: pytest.MonkeyPatch, width: int, encoding: str
) -> None:
    monkeypatch.setattr(
        console_module,
        "RichConsole",
        lambda **given: RichConsole(**given, width=width, height=60, color_system=None),
    )
    out = Out(encoding)
    console = Console("panel", 10, out)
    for step in range(4):
        console.step(row(step, **{"reward/mean": 0.1 * step, "keep/cover_frac": 0.5}))
    console.wait("a publish")
    console.event("published \u00e9 " + "x" * 500)
    console.close()
    last = out.text.rpartition("moerl |")[2]
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", last)
    assert all(len(line) <= width for line in plain.splitlines()[1:])
    squeezed = re.sub(r"[^\w.%,]", "", plain)
    assert any(block in plain for block in BLOCKS) == (encoding == "utf-8")  # the sparkline
    for shown in ("progress", "0.300", "2,450", "3,100", "5%", "50%", "published"):
        assert shown in squeezed


def test_sparkline() -> None:
    assert sparkline([], 5) == ""
    assert sparkline([1.0], 0) == ""
    assert sparkline([2.0, 2.0], 5) == BLOCKS[0] * 2
    assert sparkline([0.0, 1.0], 5) == BLOCKS[0] + BLOCKS[-1]
    rising = sparkline([float(i) for i in range(100)], 8)
    assert rising == BLOCKS


def test_clock() -> None:
    assert [clock(s) for s in (0, 65, 7389.6)] == ["0:00", "1:05", "2:03:10"]


def test_alerts_count_steps_as_the_lines_do() -> None:
    out = io.StringIO()
    console = Console("lines", 6, out)
    console.step({"step": 0, "reward/mean": 0.5, "alert/stale": 1.0})
    console.step({"step": 6, "eval/step": 6.0, "eval/reward_mean": 0.25})
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("step 1/6  ")
    assert lines[1].startswith("ALERT at step 1: alert/stale")
    assert lines[2:] == ["held out 0.250 at version 6"], "the last evaluation is no step"
