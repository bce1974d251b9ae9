"""Movements of data-parallel attention on a plain CPU, and when they are registered."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import zmq

from moerl.engine.plugin import entry_points as plugin_entry_points
from moerl.engine.plugin import server_access
from moerl.engine.plugin.hooks import HOOKS, Hook, When
from moerl.engine.protocol import DP_ATTENTION, MODEL_FOLDER
from moerl_cpu_sglang import dp_attention, registry
from moerl_cpu_sglang.entry_points import register_hooks
from tests.helpers.patience import patience

PARTS = (3, 0, 1)  # rows of each rank


def test_rows_are_copied_from_and_to_an_offset() -> None:
    whole, own = torch.arange(12.0).view(6, 2), torch.zeros(4, 2)
    at, rows = torch.tensor(2), torch.tensor(3)
    dp_attention.copy_rows(own, whole, 0, at, rows, True)
    assert own.tolist() == [[4, 5], [6, 7], [8, 9], [0, 0]]
    dp_attention.copy_rows(whole, own + 100, 0, at, rows, False)
    assert whole[:, 0].tolist() == [0, 2, 104, 106, 108, 10]


def part_of(rank: int) -> torch.Tensor:
    return torch.full((PARTS[rank], 2), float(rank)) + torch.arange(PARTS[rank])[:, None]


def _gather(rank: int, store: str, out: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    group = SimpleNamespace(world_size=3, device_group=dist.group.WORLD)
    whole = torch.empty(sum(PARTS), 2)
    dp_attention.gather_parts(group, part_of(rank), PARTS, whole)
    twice = dp_attention.gather_parts(group, [part_of(rank), 2 * part_of(rank)], PARTS)
    equal = dp_attention.gather_parts(group, torch.full((1,), float(rank)))
    out.put([t.tolist() for t in (whole, *twice, equal)])
    dist.barrier()


def test_parts_of_unequal_length_are_gathered(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    out = fork.Queue()
    ranks = [fork.Process(target=_gather, args=(r, str(tmp_path / "s"), out)) for r in range(3)]
    for rank in ranks:
        rank.start()
    found = [out.get(timeout=patience(60)) for _ in ranks]
    for rank in ranks:
        rank.join(patience(60))
    want = torch.cat([part_of(rank) for rank in range(3)])
    for whole, once, twice, equal in found:
        assert whole == once == want.tolist()
        assert twice == (2 * want).tolist()
        assert equal == [0, 1, 2]


def test_pinned_memory_is_not_asked_for() -> None:
    made: list[torch.Tensor] = []
    dp_attention.prepare(lambda: made.append(torch.tensor([3, 4], pin_memory=True)))
    assert made[0].tolist() == [3, 4]


def test_an_idle_rank_naps() -> None:
    """Short enough that a request for another rank does not wait for it."""
    begin = time.monotonic()
    dp_attention.nap(SimpleNamespace(poller=zmq.Poller()))
    assert time.monotonic() - begin < patience(0.5)


def test_ports_of_loopback_become_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "moerl-engine-x"
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    assert server_access._private("tcp://127.0.0.1:81") == f"ipc://{scratch}/port-81"
    assert server_access._private("tcp://10.0.0.1:81") == "tcp://10.0.0.1:81"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert server_access._private("tcp://127.0.0.1:81") == "tcp://127.0.0.1:81"


def test_only_engines_that_ask_for_it_get_these_hooks() -> None:
    def hooks(*, cuda: bool, dp_attention: bool) -> set[str]:
        own = (h for h in HOOKS if h.when.applies(cuda=cuda, dp_attention=dp_attention))
        return {h.ours.__name__ for h in own}

    for cuda in (False, True):
        asked = hooks(cuda=cuda, dp_attention=True)
        assert asked - hooks(cuda=cuda, dp_attention=False) == {"use_files", "bind_file"}
    assert When.ALWAYS.applies(cuda=True, dp_attention=False)


@pytest.mark.parametrize(("variables", "extra"), [({}, False), ({DP_ATTENTION: "1"}, True)])
def test_the_kernels_of_dp_attention_are_registered_for_it(
    variables: dict[str, str], extra: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[Hook] = []
    monkeypatch.delenv(DP_ATTENTION, raising=False)
    monkeypatch.delenv(MODEL_FOLDER, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(plugin_entry_points, "register", registered.extend)
    register_hooks()
    assert tuple(registered) == (*registry.FP8_HOOKS, *(registry.DP_HOOKS if extra else ()))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    registered.clear()
    register_hooks()
    assert registered == [], "with CUDA SGLang's own kernels run"
