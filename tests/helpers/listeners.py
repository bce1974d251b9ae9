"""Every socket on which a run listens: what may be there, what is there, and the page's table.

`LISTENERS` is the allow list. docs/clusters.md prints it (`table`), and a real run is compared with
it (`strangers`).  On one machine every listener must be on loopback.
"""

from __future__ import annotations

import ipaddress
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from tests.helpers.patience import Patience
from tests.helpers.train_runs import START_S, Run

_LOOK_S = 0.3
_OWN, _ENGINE = "`cluster.address`, or the node's on `cluster.interface`", "`engine.host`"
_EVERY = "**every interface**"
_NONE = "**none**"
_RAY = "Ray's token (`RAY_AUTH_MODE=token`)"


@dataclass(frozen=True, slots=True)
class Listener:
    """A kind of listener: a row of the page's table."""

    name: str
    address: str  # on several nodes; on one machine loopback
    port: str
    authentication: str
    process: str = ""  # regular expression of its process; empty: not in a run on one machine
    most: int = 0  # of one process on one machine


@dataclass(frozen=True, slots=True)
class Seen:
    """One listener of a run."""

    process: str
    pid: int
    address: str
    port: int


_RANK = r"-m moerl\.trainer\.main "
_ACTOR = r"^ray::(ControllerActor|EngineActor|ScorerActor|IDLE)"
LISTENERS = (
    Listener(
        "SGLang server, one per engine",
        _ENGINE,
        "free, printed in the log",
        "the run's token as bearer; `/health` and `/ready` answer without it",
        r"moerl\.engine\.plugin\.server_process",
        1,
    ),
    Listener(
        "weight receivers in an engine's schedulers",
        "Unix socket in a private folder (mode 0600 in 0700)",
        "-",
        "keys of the server (CURVE)",
    ),
    Listener(
        "senders of each trainer rank, one per engine",
        _OWN,
        "free between 20000 and 32000",
        "keys of the run (CURVE)",
        _RANK,
        1,
    ),
    Listener(
        "SGLang's server on the other nodes of an engine",
        _ENGINE,
        "free",
        "none; it has `/health` only",
    ),
    Listener(
        "store in which the ranks of an engine on several nodes meet",
        f"{_ENGINE} of its first node",
        "free",
        "a token of its own",
    ),
    Listener(
        "`gloo` and `nccl` stagings, and their stores", _ENGINE, "free", "the endpoint's own token"
    ),
    Listener(
        "data sockets of gloo: trainer and reference ranks",
        "the address of `cluster.interface`",
        "free",
        f"{_NONE}: a peer names a number of the pair",
        _RANK,
        40,
    ),
    Listener(
        "data sockets of gloo: ranks of an engine, `gloo` stagings and their senders",
        _ENGINE,
        "free",
        f"{_NONE}: a peer names a number of the pair",
        r"^sglang::scheduler",
        20,
    ),
    Listener("data sockets of NCCL", "`NCCL_SOCKET_IFNAME`", "free", _NONE),
    Listener(
        "`mooncake` stagings: moerl's token server", _ENGINE, "free", "the endpoint's own token"
    ),
    Listener(
        "`mooncake`: handshake and data, also on senders",
        f"{_EVERY}, whatever address is given (0.3.13, `MC_TCP_BIND_ADDRESS` included)",
        "between `MC_MIN_PRC_PORT` and `MC_MAX_PRC_PORT`",
        _NONE,
    ),
    Listener(
        "controller, for trainer rank 0",
        _OWN,
        "free between 20000 and 32000; `cluster.ports.controller` on several nodes",
        "keys of the run (CURVE)",
        r"^ray::ControllerActor",
        1,
    ),
    Listener(
        "records of engine N, on several nodes",
        "the node's address on `cluster.interface`",
        "`cluster.ports.blobs` + N; engines that join take the next numbers",
        "the run's token as bearer",
    ),
    Listener(
        "store in which the ranks of a torchrun meet, on its first node",
        _OWN,
        "free; `cluster.ports.rendezvous` and `.ref_models` on several nodes",
        "a token of its own, in a file of mode 0600 in `endpoints/`",
        r"-m moerl\.distributed\.torchrun",
        1,
    ),
    Listener("Ray: gcs_server", _EVERY, "`cluster.ports.ray`", _RAY, "/gcs_server ", 1),
    Listener("Ray: raylet", _EVERY, "free", _RAY, "/raylet ", 2),
    Listener("Ray: actors", _EVERY, "free", _RAY, _ACTOR, 1),
    Listener("Ray: the root process", _EVERY, "free", _RAY, r"moerl\.launch\.train", 1),
    Listener("Ray: RuntimeEnvAgent", "the node's address", "free", _RAY, "ray::RuntimeEnvAgent", 1),
    Listener(
        "Ray: metrics of its monitor",
        _EVERY,
        "44217",
        f"{_NONE}; numbers to read, no requests",
        r"/autoscaler/(_private|v2)/monitor\.py",
        1,
    ),
)


def table() -> str:
    """The allow list as the page prints it."""
    lines = ["| listener | address on several nodes | port | authentication |", "|---|---|---|---|"]
    lines += [f"| {x.name} | {x.address} | {x.port} | {x.authentication} |" for x in LISTENERS]
    return "\n".join(lines) + "\n"


def watch(run: Run) -> set[Seen]:
    """All listeners of all processes of the run, until it ends."""
    found: set[Seen] = set()
    limit = Patience(START_S)
    while run.process.poll() is None:
        assert not limit.over(), f"the run does not end:\n{run.text()}"
        found |= now(run)
        time.sleep(_LOOK_S)
    return found


def now(run: Run) -> set[Seen]:
    found: set[Seen] = set()
    try:
        members = run.members()
    except psutil.NoSuchProcess:
        return found
    for member in members:
        try:
            command = " ".join(member.cmdline())
            found |= {
                Seen(command, member.pid, one.laddr.ip, one.laddr.port)
                for one in member.net_connections("inet")
                if one.status == psutil.CONN_LISTEN
            }
        except psutil.Error:  # it has ended
            continue
    return found


def strangers(seen: Iterable[Seen]) -> list[str]:
    """A sentence for each listener of a run on one machine that the allow list does not have."""
    seen = list(seen)
    found = [
        f"{one.process[:100]} listens on {one.address}:{one.port}"
        for one in seen
        if not _loopback(one.address)
    ]
    sockets: dict[int, set[tuple[str, int]]] = {}
    for one in seen:
        sockets.setdefault(one.pid, set()).add((one.address, one.port))
    for pid, ports in sockets.items():
        names = {one.process for one in seen if one.pid == pid}  # a worker of Ray is renamed
        most = sum(x.most for x in LISTENERS if x.process and _is(x.process, names))
        if len(ports) > most:
            found.append(f"{sorted(names)[0][:100]} has {len(ports)} listeners; {most} are listed")
    return found


def missing(seen: Iterable[Seen]) -> list[str]:
    """Names of listed listeners of a run on one machine whose process listened on nothing."""
    names = {one.process for one in seen}
    return [x.name for x in LISTENERS if x.process and not _is(x.process, names)]


def _is(process: str, names: Iterable[str]) -> bool:
    return any(re.search(process, name) for name in names)


def _loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback
