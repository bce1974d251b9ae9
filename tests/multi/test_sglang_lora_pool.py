"""`adapter/sglang` in the memory pool of SGLang's own LoRA manager, at three layouts.

Wrong names and shapes load without an error and raise when the pool is filled, in the first forward
pass: the controls do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers.patience import patience
from tests.helpers.sglang_lora_pool import FAMILIES, LAYOUTS
from tests.helpers.trainer_support import ROOT

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pool")
    packages = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/helpers/sglang_lora_pool.py"), str(folder)],
        env=os.environ | {"PYTHONPATH": packages, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=patience(400),
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    result: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pool_holds_every_product(found: dict[str, Any], family: str) -> None:
    one = found[f"{family}-tp1-0"]
    assert one["error"] == ""
    assert one["gap"] <= 1e-6
    assert one["wrong_scale"] > 1e-3, "control"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_takes_its_part(found: dict[str, Any], family: str, layout: str) -> None:
    ranks = [found[f"{family}-{layout}-{rank}"] for rank in range(LAYOUTS[layout].get("tp", 1))]
    assert [rank["error"] for rank in ranks] == [""] * len(ranks)


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_names_and_shapes_are_noticed(found: dict[str, Any], family: str) -> None:
    assert "Cannot find target module" in found[f"{family}-peft"]["error"]
    assert "does not match weight shape" in found[f"{family}-short"]["error"]
