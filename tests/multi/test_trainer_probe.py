"""The probe on real Megatron ranks: quiet over right records, loud over wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

from moerl.observe.console import alerts
from tests.helpers.rank_server import run_ranks
from tests.helpers.trainer_support import ROOT, make_model

WORKER = str(ROOT / "tests" / "helpers" / "trainer_probe_ranks.py")


def test_the_probe_tells_right_records_from_wrong_ones(tmp_path: Path) -> None:
    model, out = make_model(tmp_path / "model"), tmp_path / "found.json"
    paths = ["--model", str(model), "--work", str(tmp_path), "--out", str(out)]
    run_ranks(2, [WORKER, *paths, "--ranks", "2"])
    found = json.loads(out.read_text())
    right = found["recorded"]
    assert alerts(right) == []
    assert right["probe/exact_abs_dlogp_max"] <= 1e-5
    assert right["probe/live_agree_frac"] == 1.0
    assert right["alert/replay_worth"] == 0.0
    every = ["alert/replay_exact", "alert/replay_routes", "alert/replay_worth"]
    for wrong in ("shifted", "random"):
        assert alerts(found[wrong]) == every
        assert found[wrong]["probe/live_agree_same_input_frac"] < 0.3
    # At lag 3 there is nothing to compare exactly; the other two questions are still answered.
    stale = found["stale"]
    assert "alert/replay_exact" not in stale
    assert (stale["alert/replay_routes"], stale["alert/replay_worth"]) == (0.0, 0.0)
