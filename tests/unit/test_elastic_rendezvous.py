"""How torchrun's agents meet: rounds, restarts, lost agents; and the store of their ranks."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

from moerl.core.errors import ConfigError, TrainerError, TransportError
from moerl.distributed import elastic_rendezvous
from moerl.distributed.elastic_rendezvous import JobPlace, MoerlRendezvous, create
from moerl.distributed.store_server import Rounds, StoreServer
from moerl.distributed.token_store import VARIABLE, TokenStore, rank_store, store_variable
from tests.helpers.patience import patience

ROOT = Path(__file__).resolve().parents[2]
WAIT = timedelta(seconds=20)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# --- rounds --------------------------------------------------------------------------------------
def test_a_round_forms_when_all_slots_have_asked() -> None:
    rounds = Rounds(2)
    assert rounds.join(0, "a") == 0
    assert rounds.join(0, "a") == 0
    assert rounds.join(1, "b") == 1
    assert rounds.join(0, "a") == 1
    assert rounds.behind(1) == 0


def test_an_agent_that_joins_again_calls_the_others() -> None:
    rounds = Rounds(2)
    rounds.join(0, "a")
    rounds.join(1, "b")
    assert rounds.join(1, "c") == 0, "a new attempt is not in the round of the one before"
    assert rounds.behind(1) == 1
    assert rounds.join(0, "d") == 2
    assert rounds.join(1, "c") == 2
    assert rounds.behind(2) == 0


def test_an_agent_that_went_silent_is_not_waited_for() -> None:
    clock = Clock()
    rounds = Rounds(2, clock)
    rounds.join(0, "a")
    clock.now = 60.0
    assert rounds.join(1, "b") == 0, "the other is dead: it would never start its ranks"
    assert rounds.join(0, "c") == 2 - 1
    clock.now = 120.0
    rounds.join(0, "d")
    assert rounds.behind(1) == 1
    clock.now = 180.0
    assert rounds.behind(1) == 0


def test_a_round_of_another_server_is_over() -> None:
    assert Rounds(2).behind(7) == 2, "slot 0 was started again: its rounds count from 0"


def test_only_slots_of_the_job_may_join() -> None:
    with pytest.raises(TransportError, match="slot 2 of a job of 2"):
        Rounds(2).join(2, "a")


# --- the store -----------------------------------------------------------------------------------
@pytest.fixture
def server() -> Iterator[StoreServer]:
    made = StoreServer("127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def store(server: StoreServer) -> TokenStore:
    return TokenStore(server.server_address, WAIT)


def test_it_does_what_torchs_store_does(store: TokenStore) -> None:
    """Oracle: the same calls of torch's HashStore.

    Also through a wrapper of torch: its C++ calls the store by names of its own, as NCCL does.
    """
    for one in (store, dist.PrefixStore("wrapped", store), dist.HashStore()):
        one.set("a", "1")
        one.set("b", b"\0\xff")
        assert one.get("b") == b"\0\xff"
        assert (one.add("n", 5), one.add("n", -2), one.get("n")) == (5, 3, b"3")
        assert one.check(["a", "b"])
        assert not one.check(["a", "none"])
        assert one.compare_set("c", "", "first") == b"first"
        assert one.compare_set("c", "other", "second") == b"first"
        assert one.compare_set("c", "first", "second") == b"second"
        one.append("d", "x")
        one.append("d", "y")
        assert one.multi_get(["d", "a"]) == [b"xy", b"1"]
        one.multi_set(["e", "f"], ["5", "6"])
        assert one.get("f") == b"6"
        assert one.delete_key("f")
        assert not one.delete_key("f")
        assert one.num_keys() >= 5
        one.wait(["a", "b"])
        one.wait(["a"], WAIT)


def test_it_has_every_function_that_torch_leaves_to_a_store() -> None:
    """By torch's own header: one without a body there is an error where NCCL calls it."""
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/Store.hpp"
    body = header.read_text().split("class TORCH_API Store ")[1].split("\n};")[0]
    names = set(re.findall(r"virtual [^;{]*?(\w+)\([^;{]*\) = 0;", body))
    assert {"add", "deleteKey", "getNumKeys", "clone"} <= names
    renamed = {"compareSet": "compare_set"}
    assert not {n for n in names if renamed.get(n, n) not in vars(TokenStore)}


def test_a_copy_serves_a_thread_after_torch_has_dropped_the_wrapper(store: TokenStore) -> None:
    copy = dist.PrefixStore("x", store).clone()
    gc.collect()
    with ThreadPoolExecutor() as pool:
        assert pool.submit(copy.add, "n", 3).result(patience(10)) == 3
    assert store.get("x/n") == b"3"


def test_a_missing_key_is_an_error_in_time(store: TokenStore) -> None:
    store.set_timeout(timedelta(seconds=0.2))
    begin = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="no value of \\['none'\\] within"):
        store.get("none")
    with pytest.raises(dist.DistStoreError):
        store.wait(["none"], timedelta(seconds=0.1))
    assert time.monotonic() - begin < patience(5)


def test_a_thread_that_waits_blocks_no_other(store: TokenStore) -> None:
    with ThreadPoolExecutor() as pool:
        waits = [pool.submit(store.get, "late") for _ in range(3)]
        time.sleep(0.1)
        store.set("late", "now")
        assert [wait.result(patience(10)) for wait in waits] == [b"now"] * 3


def test_torch_uses_it_for_groups(server: StoreServer) -> None:
    """Two ranks in threads, over gloo; torch keeps wrappers of the store only."""

    def rank(number: int) -> float:
        store = TokenStore(server.server_address, WAIT)
        wrapped = dist.PrefixStore("x", store)
        gloo = dist.ProcessGroupGloo(wrapped, number, 2, WAIT)
        tensor = torch.ones(1)
        gloo.allreduce([tensor]).wait()
        return float(tensor)

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(rank, range(2))) == [2.0, 2.0]


def test_ranks_find_their_round_and_hide_it(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, store_variable(server.server_address, 3)[VARIABLE])
    rank_store(WAIT).set("a", "1")
    assert VARIABLE not in os.environ, "what a rank starts does not inherit it"
    assert TokenStore(server.server_address, WAIT).get("round-3/a") == b"1"
    with pytest.raises(TrainerError, match=r"start the ranks with python -m moerl\.distributed"):
        rank_store(WAIT)


# --- agents --------------------------------------------------------------------------------------
class Agents:
    """Rendezvous of a job of two nodes; `meet` is what both agents do at a start of their ranks."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.nodes = [self.node(0), self.node(1)]

    def node(self, slot: int) -> MoerlRendezvous:
        place = JobPlace(slot, 2, "127.0.0.1", 0, self.file)
        return MoerlRendezvous(place, "run", join_s=20.0)

    def meet(self) -> list[int]:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: node.next_rendezvous(), self.nodes))
        return [node._number for node in self.nodes]

    def waiting(self, slot: int) -> int:
        return self.nodes[slot].num_nodes_waiting()


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    monkeypatch.setattr(elastic_rendezvous, "_AWAY_S", 0.0)
    monkeypatch.setenv(VARIABLE, "")  # removed again
    made = Agents(tmp_path / "store.json")
    yield made
    for node in made.nodes:
        node.shutdown()


def test_agents_meet_again_after_a_rank_failed(agents: Agents) -> None:
    assert agents.meet() == [1, 1]
    assert (agents.waiting(0), agents.waiting(1)) == (0, 0)
    again = threading.Thread(target=agents.nodes[1].next_rendezvous)
    again.start()
    while not agents.waiting(0):
        time.sleep(0.01)
    agents.nodes[0].next_rendezvous()
    again.join(patience(20))
    assert [node._number for node in agents.nodes] == [2, 2]


def test_a_lost_first_agent_ends_nothing_until_it_is_back(agents: Agents) -> None:
    agents.meet()
    agents.nodes[0].shutdown()
    assert agents.waiting(1) == 0, "the ranks' own limits decide"
    agents.nodes[0] = agents.node(0)
    assert agents.waiting(1) > 0
    assert agents.meet() == [1, 1], "of the new server"


def test_a_new_round_has_no_key_of_the_one_before(agents: Agents) -> None:
    infos = []
    for _ in range(2):
        with ThreadPoolExecutor() as pool:
            infos.append(list(pool.map(lambda node: node.next_rendezvous(), agents.nodes)))
        infos[-1][0].store.set("a", "1")
        assert infos[-1][1].store.get("a") == b"1"
    again = MoerlRendezvous.next_rendezvous
    with ThreadPoolExecutor() as pool:
        list(pool.map(again, agents.nodes))
    assert agents.nodes[0]._store is not None
    assert agents.nodes[0]._store.num_keys() == 0


def test_the_file_of_the_store_is_its_owners_and_goes_with_it(agents: Agents) -> None:
    assert agents.file.stat().st_mode & 0o777 == 0o600
    agents.nodes[0].shutdown()
    assert not agents.file.exists()


def test_a_node_that_stays_alone_says_so(tmp_path: Path) -> None:
    node = MoerlRendezvous(JobPlace(0, 2, "127.0.0.1", 0, tmp_path / "x"), "run", join_s=0.3)
    with pytest.raises(RendezvousTimeoutError, match=r"2 nodes did not meet within 0\.3 s"):
        node.next_rendezvous()
    node.shutdown()


def test_torchs_own_torchrun_finds_it_when_installed() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    point = EntryPoint(value=points["torchrun.handlers"]["moerl"], name="moerl", group="")
    elastic_rendezvous.register()
    rendezvous_handler_registry.register("moerl", point.load()())  # a second time, as torchrun does
    params = RendezvousParameters("moerl", "", "run", 1, 1)
    handler = rendezvous_handler_registry.create_handler(params)
    assert isinstance(handler, MoerlRendezvous)
    handler.shutdown()


@pytest.mark.parametrize(
    ("nodes", "endpoint", "field"), [((1, 2), "/x", "--nnodes"), ((2, 2), "", "--rdzv-endpoint")]
)
def test_what_cannot_work_is_refused(nodes: tuple[int, int], endpoint: str, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        create(RendezvousParameters("moerl", endpoint, "run", *nodes))
