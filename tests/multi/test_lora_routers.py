"""Adapters of routers with Keep Routing: gradient through the replayed experts' weights alone.

The oracle is the gradient of the whole router in a model without adapters and with equal weights,
which test_trainer_parity.py compares with transformers: dA = s B' dW, dB = s dW A'.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.rank_server import run_ranks
from tests.helpers.trainer_support import ROOT, make_model


@pytest.mark.full
def test_factors_of_routers_have_the_gradient_of_the_replayed_routes(tmp_path: Path) -> None:
    script = str(ROOT / "tests/helpers/router_adapter_ranks.py")
    model = make_model(tmp_path / "model")
    out = run_ranks(1, [script, "--model", str(model), "--work", str(tmp_path)])
    found = json.loads(out.strip().splitlines()[-1])
    assert found["R3"]["gap"] < 1e-5
    assert found["off"]["gap"] < 1e-5
    assert found["off"]["moved"] > 0.1, "live routes have another gradient: the control"
