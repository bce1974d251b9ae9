"""Which transport a cluster gets, what is refused, and what Mooncake is told."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import time
from types import ModuleType

import pytest
import torch

from moerl.config import Config, load_config, resolve
from moerl.config.clusters import placement
from moerl.config.transport_rules import (
    CUMEM,
    DEVICES,
    INTERFACES,
    PROTOCOL,
    default_transport,
    first_group,
    mooncake_protocol,
    transport_environment,
)
from moerl.core.errors import TransportError
from moerl.launch.run_context import engine_environment, rank_environment
from moerl.planning.dry_run import describe
from moerl.planning.estimates import model_shapes
from moerl.planning.publish_forecast import auto_transport
from moerl.weight_sync.transports import mooncake
from moerl.weight_sync.transports.factory import make
from moerl.weight_sync.transports.pair_pipes import AGREED
from moerl.weight_sync.transports.process_group import check_settings

OLMOE = ("cluster=node8", "engine.platform=cuda")
CARDS = ("cluster.nodes.engine.rdma=[mlx5_0,mlx5_1]", "cluster.nodes.trainer.rdma=[mlx5_2]")
SLURM = ("cluster=slurm", "trainer.parallel={dp: 2, ep: 2}")
HOSTS = ("cluster=hosts", "cluster.nodes.engine.hosts=[10.9.0.1]")
HOSTS = (*HOSTS, "cluster.nodes.trainer.hosts=[10.9.0.2,10.9.0.3]")


def settings(*overrides: str, recipe: str = "quickstart") -> Config:
    return load_config(recipe, overrides)


# --- auto -----------------------------------------------------------------------------------------
def test_auto_is_the_gpus_own_network_where_all_have_gpus() -> None:
    choice = default_transport(settings("cluster=slurm"))
    assert (choice.name, "NCCL finds" in choice.reason) == ("nccl", True)
    named = default_transport(settings("cluster=slurm", *CARDS))
    assert (named.name, "mlx5_0, mlx5_1, mlx5_2" in named.reason) == ("nccl", True)
    for cpu in ("engine.platform=cpu", "trainer.platform=cpu", "cluster.nodes.engine.devices=0"):
        both = ("engine.platform=auto", "trainer.platform=auto")
        assert default_transport(settings("cluster=slurm", *both, cpu)).name == "gloo"


@pytest.mark.parametrize("installed", [True, False])
def test_auto_between_cpus_is_mooncake_only_by_rdma_and_where_it_is_installed(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ModuleType("mooncake") if installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert default_transport(settings(*HOSTS)).name == "gloo"
    assert default_transport(settings(*HOSTS, CARDS[0])).name == "gloo", "one side has no card"
    choice = default_transport(settings(*HOSTS, *CARDS))
    assert choice.name == ("mooncake" if installed else "gloo")
    assert installed or "pip install '.[mooncake-cpu]'" in choice.reason


def test_auto_on_one_node_follows_the_memory_of_an_engines_gpu() -> None:
    config = settings(*OLMOE, recipe="olmoe-1b-7b")
    shapes = model_shapes(config)
    choice = auto_transport(config, shapes)
    assert choice.name == "cuda_ipc", choice
    small = settings(*OLMOE, "cluster.nodes.all.device_gb=16", recipe="olmoe-1b-7b")
    assert auto_transport(small, shapes).name == "shm"
    assert "does not fit" in auto_transport(small, shapes).reason
    unknown = settings(*OLMOE, "cluster.nodes.all.device_gb=0", recipe="olmoe-1b-7b")
    assert "device_gb is not given" in auto_transport(unknown, shapes).reason
    for other in ("sync.delta=true", "sync.direct=1", "trainer.platform=cpu"):
        assert auto_transport(settings(*OLMOE, other), shapes).name == "shm"
    assert auto_transport(settings(), shapes).name == "shm", "a laptop"


def test_the_dry_run_says_which_transport_and_why() -> None:
    text = describe(resolve(settings(*OLMOE, recipe="olmoe-1b-7b")), [])
    assert "sync.transport: shm; auto is cuda_ipc, since staging on the GPU fits" in text
    tcp = resolve(settings("cluster=slurm", "sync.transport=mooncake", recipe="qwen3-30b-a3b"))
    assert "sync.transport: mooncake by tcp (no RDMA: cluster.nodes.*.rdma" in describe(tcp, [])


# --- refused --------------------------------------------------------------------------------------
# --- mooncake -------------------------------------------------------------------------------------
def test_the_cards_of_a_node_reach_its_processes() -> None:
    config = settings(*SLURM, "sync.transport=mooncake", *CARDS)
    slot = placement(config).trainers[0]
    found = rank_environment(config, slot)
    assert (found[PROTOCOL], found[DEVICES]) == ("rdma", "mlx5_2")
    engine = transport_environment(config, first_group(config, "engine"))
    assert (engine[PROTOCOL], engine[DEVICES]) == ("rdma", "mlx5_0,mlx5_1")
    tcp = settings(*SLURM, "sync.transport=mooncake", "sync.mooncake_protocol=tcp", *CARDS)
    engine = transport_environment(tcp, first_group(tcp, "engine"))
    assert (engine[PROTOCOL], engine[DEVICES]) == ("tcp", "")
    half = settings(*SLURM, "sync.transport=mooncake", CARDS[0])
    assert mooncake_protocol(half) == "tcp", "both sides speak the same"
    assert PROTOCOL not in transport_environment(settings(*SLURM), slot.node.group)


# --- nccl -----------------------------------------------------------------------------------------
SHELL = {CUMEM: "2", "NCCL_SOCKET_IFNAME": "eth9", "NCCL_ALGO": "ring"}  # of one node
SEPARATE = (*SLURM, "sync.transport=nccl", "ref_models.placement=separate", "algorithm.kl_coef=0.1")
SEPARATE += ("ref_models.parallel={dp: 2}",)
DETERMINISTIC = ("engine.args.enable_deterministic_inference=true", "engine.tp=2")


@pytest.mark.parametrize(
    ("overrides", "variable", "value"),
    [
        ((), CUMEM, "0"),
        (("cluster.environment.NCCL_CUMEM_ENABLE='1'",), CUMEM, "1"),
        (("engine.args.enable_symm_mem=true",), CUMEM, "1"),
        (DETERMINISTIC, "NCCL_ALGO", "allreduce:tree"),
        ((), "NCCL_SOCKET_IFNAME", "eth0"),
        ((), "GLOO_SOCKET_IFNAME", "eth0"),
        (("cluster.environment.NCCL_SOCKET_IFNAME=ib0",), "NCCL_SOCKET_IFNAME", "ib0"),
        (CARDS, "NCCL_IB_HCA", None),
    ],
)
def test_one_function_names_the_variables_of_all_processes(
    overrides: tuple[str, ...], variable: str, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the shell of a node says; the cards are those of the process's own node."""
    for name, text in SHELL.items():
        monkeypatch.setenv(name, text)
    config = settings(*SEPARATE, *overrides)
    placed = placement(config)
    found = {
        "engine": engine_environment(config),
        "trainer": rank_environment(config, placed.trainers[0]),
        "reference": rank_environment(config, placed.ref_models[0]),
    }
    cards = {"engine": "mlx5_0,mlx5_1", "trainer": "mlx5_2", "reference": "mlx5_2"}
    assert {who: one[variable] for who, one in found.items()} == {
        who: value or cards[who] for who in found
    }


@pytest.mark.parametrize("recipe", ["quickstart", "olmoe-1b-7b"])
def test_on_one_machine_nccl_and_gloo_listen_on_loopback(recipe: str) -> None:
    config = settings(recipe=recipe)
    rank = rank_environment(config, placement(config).trainers[0])
    for found in (engine_environment(config), rank):
        assert {found[name] for name in INTERFACES} == {"lo"}


def test_an_end_that_differs_is_refused_by_variable_and_both_values() -> None:
    ours = {"NCCL's version": "2.30.7"} | dict.fromkeys(AGREED, "") | {CUMEM: "0"}
    check_settings(ours, dict(ours))
    for name in ours:
        with pytest.raises(TransportError) as caught:
            check_settings(ours | {name: "other"}, ours)
        assert caught.value.reason == "refused"
        here = ours[name] or "not set"
        assert f"{name} is other in the engine and {here} in this" in caught.value.detail


def test_what_a_host_decides_for_itself_is_not_compared() -> None:
    assert not {*INTERFACES, "NCCL_IB_HCA", "NCCL_NVLS_ENABLE"} & set(AGREED)


class StubTransferEngine:
    """The Transfer Engine's calls, over memory of this process."""

    started: tuple[str, str, str, str] = ("", "", "", "")
    answer = 0

    def initialize(self, address: str, metadata: str, protocol: str, devices: str) -> int:
        StubTransferEngine.started = (address, metadata, protocol, devices)
        return self.answer

    def get_rpc_port(self) -> int:
        return 12345

    def get_first_buffer_address(self, session: str) -> int:
        return 0

    def register_memory(self, base: int, num_bytes: int) -> int:
        return 0

    def unregister_memory(self, base: int) -> int:
        return 0

    def transfer_submit_write(self, session: str, source: int, target: int, size: int) -> int:
        ctypes.memmove(target, source, size)
        return 7

    def transfer_check_status(self, batch: int) -> int:
        return mooncake._DONE


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> type[StubTransferEngine]:
    monkeypatch.setattr(mooncake, "_library", lambda: StubTransferEngine)
    monkeypatch.setattr(StubTransferEngine, "answer", 0)
    mooncake._shared.cache_clear()
    return StubTransferEngine


@pytest.mark.parametrize(("protocol", "cards"), [("rdma", "mlx5_0,mlx5_1"), ("tcp", "")])
def test_mooncake_takes_protocol_and_cards_from_the_environment(
    stub: type[StubTransferEngine],
    protocol: str,
    cards: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(PROTOCOL, protocol)
    monkeypatch.setenv(DEVICES, cards)
    transport = make("mooncake", address="127.0.0.1")
    assert stub.started == ("127.0.0.1", "P2PHANDSHAKE", protocol, cards)
    assert ("mooncake uses TCP" in caplog.text) == (protocol == "tcp")
    staging = transport.open(100)
    assert not staging.buffer.is_cuda
    link = transport.connect(staging.endpoint, time.monotonic() + 60)
    link.put(3, torch.arange(10, dtype=torch.uint8), time.monotonic() + 60)
    link.flush(time.monotonic() + 60)
    assert staging.buffer[3:13].tolist() == list(range(10))
    other = json.loads(staging.endpoint) | {"protocol": "other"}
    with pytest.raises(TransportError, match="the engine speaks other"):
        transport.connect(json.dumps(other).encode(), time.monotonic() + 60)
    link.close()
    staging.close()


def test_a_card_that_cannot_be_used_is_named(
    stub: type[StubTransferEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stub, "answer", -1)
    monkeypatch.setenv(PROTOCOL, "rdma")
    monkeypatch.setenv(DEVICES, "mlx5_9")
    with pytest.raises(TransportError, match="with mlx5_9: it answered -1"):
        make("mooncake", address="127.0.0.1")
