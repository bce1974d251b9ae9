"""configs/gpu_choices.json made again: by SGLang's resolution and Transformer Engine's function.

Both run in processes of their own: their answers about the device hold for a whole process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moerl.planning import gpu_choices
from tools.stages import GPU_PROFILE, ROOT

pytestmark = pytest.mark.timeout(600)

TABLE = json.loads(gpu_choices.FILE.read_text(encoding="utf-8"))
BEGIN = "import json; from pathlib import Path; from tools import gpu_choices as g; "
FP32 = """
from moerl.config import load_config; from moerl.config.clusters import placement
from moerl.planning.estimates import model_shapes
config = load_config("quickstart", ("cluster=node8", "engine.dtype=float32"))
shapes, placed = model_shapes(config), placement(config)
args = g.gpu_choices.engine_arguments(config, placed, 1, Path(), shapes)
found = (g.resolved(card, args, shapes) for card in ("H100", "B200"))
print(json.dumps([g.choices(one)["decode"] for one in found]))
"""
GPT_OSS = """
from moerl.config import load_config; from moerl.layout import model_spec
from moerl.planning.estimates import model_shapes
utils, found = g.te_utils(Path({te!r})), []
for cp in (1, 2):
    layout = f"trainer.parallel.cp={{cp}}", f"trainer.parallel.dp={{8 // cp}}"
    config = load_config("gpt-oss-120b", layout)
    found.append(g.te_backend(utils, "H100", config, model_spec(model_shapes(config))))
print(json.dumps(found))
"""


def run(code: str, python: Path = Path(sys.executable)) -> Any:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [python, "-c", BEGIN + code],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
def test_engines_are_resolved_as_the_table_says() -> None:
    assert run("print(json.dumps(g.engines(list(g.planned()))))") == TABLE["engines"]


@pytest.mark.full
def test_sglang_takes_attention_by_the_gpu_whatever_the_dtype() -> None:
    """So the dry run refuses float32: neither has it."""
    assert run(FP32) == ["fa3", "trtllm_mha"]


@pytest.mark.gpu_profile
def test_the_gpu_profile_resolves_alike() -> None:
    """With FlashInfer and SGLang's kernels installed."""
    found = run("print(json.dumps(g.engines(list(g.planned()))))", GPU_PROFILE / "bin/python")
    assert found == TABLE["engines"]


@pytest.mark.gpu_profile
def test_transformer_engine_takes_what_the_table_says() -> None:
    code = f"print(json.dumps(g.trainers(list(g.planned()), Path({str(GPU_PROFILE)!r}))))"
    assert run(code) == TABLE["trainers"]


@pytest.mark.gpu_profile
def test_transformer_engine_has_no_attention_of_sinks_with_context_parallelism() -> None:
    """So the dry run refuses it."""
    assert run(GPT_OSS.format(te=str(GPU_PROFILE))) == ["FusedAttention (cuDNN)", "none"]
