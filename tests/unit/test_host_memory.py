"""The memory saver of a plain CPU: pages that return, addresses that stay, a guard that bites."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from moerl.core.errors import EngineError
from moerl.engine.plugin.host_memory import HostMemory, create
from moerl.engine.plugin.sleep_hooks import _kept_nowhere
from tests.helpers.rank_server import run_code

MILLION = 1000 * 1000


def rss() -> int:
    """Bytes of private memory of this process."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) << 10


def test_pages_return_and_views_stay_valid() -> None:
    saver, other = HostMemory(), torch.ones(MILLION)
    with saver.region("returning"):
        whole = torch.ones(16 * MILLION)
        view = whole[MILLION : 2 * MILLION]
        gone = torch.ones(MILLION)
        small = torch.ones(10)
    before = torch.ones(MILLION)
    del gone
    touched = saver.resident("returning")
    assert 63 * MILLION < touched <= 64 * MILLION
    awake = rss()
    saver.pause("returning")
    assert awake - rss() >= 0.9 * touched
    assert (other.sum(), before.sum(), small.sum()) == (MILLION, MILLION, 10)
    saver.resume("returning")
    assert saver.resident("returning") == 0
    assert view.sum() < 4096, "contents are lost, but for the first page"
    whole.fill_(2)
    assert view.sum() == 2 * MILLION
    assert saver.resident("returning") == touched


def test_pages_that_were_not_touched_are_no_bytes() -> None:
    saver = HostMemory()
    with saver.region("lazy"):  # so large that malloc has no freed memory of other tests for it
        pool = torch.empty(1000 * MILLION)
    assert saver.resident("lazy") < MILLION
    pool[: 2 * MILLION] = 1
    assert 7 * MILLION < saver.resident("lazy") < 9 * MILLION


def test_a_process_that_reads_a_paused_page_ends() -> None:
    lines = [
        "import torch",
        "from moerl.engine.plugin.host_memory import HostMemory",
        "saver = HostMemory()",
        "with saver.region('x'): pool = torch.ones(1000, 1000)",
        "saver.pause('x')",
        "print(float(pool.sum()))",
    ]
    for code, ends in ((lines, -signal.SIGSEGV), (lines[:4] + lines[5:], 0)):
        assert run_code("\n".join(code)).returncode == ends


def test_a_backup_is_refused_and_a_server_without_the_saver_keeps_its_own() -> None:
    with pytest.raises(EngineError, match="has no backup"), HostMemory().region("x", True):
        pass
    assert isinstance(create(lambda enable: enable, True), HostMemory)
    assert create(lambda enable: enable, False) is False


def test_tensors_that_nothing_brings_back_are_named() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.register_buffer("table", torch.ones(2))
            self.alias = self.inner.weight.data

    module = Module()
    assert _kept_nowhere(module) == ""
    module.inner.lost = torch.ones(3)
    assert _kept_nowhere(module) == "inner.lost"
    del module.inner.lost
    module.inner.bias._skip_weight_check = True  # type: ignore[attr-defined]
    assert _kept_nowhere(module) == "inner.bias"
