"""What the CPU platform replaces in torch leaves the rest of a process as it was."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers.patience import patience

PROGRAM = """
import sys
import torch
from moerl.trainer.model import cpu_patches

if "early" in sys.argv:  # control: as if torch had looked for its functions after the patch
    cpu_patches._device_constructors = lambda: None
cpu_patches._patch_factories()
with torch.device("meta"):
    made = [torch.empty(2), torch.arange(3), torch.zeros_like(torch.ones(1)), torch.tensor([1.0])]
print({tensor.device.type for tensor in made})
print(torch.ones(1, device="cuda").device, torch.empty(1, pin_memory=True).is_pinned())
"""


def _run(*arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=True,
    )
    return done.stdout.splitlines()


def test_a_device_block_still_places_tensors() -> None:
    assert _run() == ["{'meta'}", "cpu False"]
    assert _run("early")[0] != "{'meta'}", "control"
