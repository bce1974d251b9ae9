"""The page of `moerl mismatch`: complete, self-contained, foreign names escaped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from moerl.audit.mismatch_page import VARIANTS, attribute, by_lag, by_position, write_page


def findings(lags: int = 3) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    gaps = {name: rng.normal(0, 0.1, 60) for name in VARIANTS}
    metrics = dict.fromkeys(
        ("k3", "abs_dlogp_mean", "abs_dlogp_p99", "abs_dlogp_max", "ratio_mean", "extreme_frac_2"),
        0.125,
    )
    worst = {
        "rollout": "<script>a</script>", "position": 7, "token": 3, "lag": 1, "kept": 5,
        "engine": -1.5, "gaps": dict.fromkeys(VARIANTS, 0.25), "moved": True, "cause": "routing",
    }  # fmt: skip
    where = {
        "attribution": attribute(gaps),
        "layers": [
            {"layer": n, "agree_frac": 0.9, "same_input_frac": 0.99, "margin": [1e-3, 0.1, 0.4]}
            for n in (1, 2)
        ],
        "position": by_position(np.arange(60) % 20, gaps),
        "lag": by_lag(np.arange(60) % lags, gaps),
        "worst": [worst],
    }
    return {
        "model": "models/<b>x</b>",
        "source": "x.jsonl",
        "tokens": 60,
        "engine_dtype": "float32",
        "results": {dtype: dict.fromkeys(VARIANTS, metrics) for dtype in ("fp32", "bf16")},
        "where": dict.fromkeys(("fp32", "bf16"), where),
    }


def test_page_is_complete_and_stands_alone(tmp_path: Path) -> None:
    text = write_page(tmp_path / "out" / "m.html", findings()).read_text()
    assert text.count("<svg") == 2 * 7
    assert "<script" not in text
    assert "&lt;script&gt;a" in text
    assert "<b>x" not in text
    assert not re.search(r'(?:src|href)="(?!#)', text)
    for words in ("by layer", "along the response", "by age", "Worst tokens", "+2.50e-01"):
        assert words in text
    assert "<td>" not in text, "a narrow screen has no head: each cell shows its column"
    for title in ("p99 |d|", "E[ratio]", "Rollout", "d, both"):
        assert f'data-label="{title}"' in text


def test_one_lag_is_said_and_not_drawn(tmp_path: Path) -> None:
    text = write_page(tmp_path / "m.html", findings(lags=1)).read_text()
    assert text.count("<svg") == 2 * 6
    assert "all tokens have lag 0" in text
