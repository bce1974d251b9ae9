"""Requests of a run (`moerl.core.rpc`) against plain ZeroMQ, in one pair of processes.

    python bench/rpc.py [--rounds 5] [--seconds 1] [--mib 32]

Plain is one ROUTER and one DEALER with the frames [token, id, message]: no keys, no encryption, no
parts.  Servers are processes of their own; rounds of the two alternate, so that the load of the
machine is the same for both.  Printed per round and as medians:

- round trips/s of a small request (AskEngine)
- MB/s of a long request and of a long reply
- longest time of a small request while another client gets a plan of 2,000 groups

Ratios are new / plain.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import psutil
import zmq
import zmq.asyncio

from moerl.core.messages import AskEngine, EngineVersion, Failed, Message, Ok, Plan, Refused
from moerl.core.rpc import Keys, RpcClient, RpcServer
from moerl.core.serialization import decode, encode
from moerl.core.types import BatchPlan, EpisodeGroup, PolicyVersion, Prompt

V0 = PolicyVersion(0, 0)
LONG_REPLY, PLAN = 1, 2  # engines that a request names to get one
GROUPS, TOKENS = 2000, 2000


@dataclass(frozen=True, slots=True)
class Result:
    trips_per_s: float
    request_mb_per_s: float
    reply_mb_per_s: float
    stall_ms: float
    cpu_s: float  # of both processes, for one long request and one long reply


def plan() -> Plan:
    prompts = [Prompt(i, tuple(range(TOKENS)), "", "", {}) for i in range(GROUPS)]
    groups = tuple(EpisodeGroup(prompt.index, prompt, ()) for prompt in prompts)
    return Plan(BatchPlan(0, V0, groups, (), 0))


def make_handler(size: int) -> Callable[[Message], Message]:
    replies: dict[int, Message] = {LONG_REPLY: Refused("x" * size), PLAN: plan()}

    def handle(message: Message) -> Message:
        if isinstance(message, AskEngine):
            return replies.get(message.engine, EngineVersion(V0, ""))
        return Ok()

    return handle


# --- the two servers ------------------------------------------------------------------------------
def serve_new(keys: Keys, size: int, pipe: Connection) -> None:
    answer = make_handler(size)

    async def handle(message: Message) -> Message:
        return answer(message)

    server = RpcServer("tcp://127.0.0.1:*", keys, handle)
    pipe.send(server.endpoint)
    asyncio.run(server.serve())


def serve_plain(_keys: Keys, size: int, pipe: Connection) -> None:
    answer = make_handler(size)

    async def serve() -> None:
        socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        pipe.send(f"tcp://127.0.0.1:{port}")
        tasks = set()

        async def reply(identity: bytes, name: bytes, data: bytes) -> None:
            message = answer(decode(data))
            is_long = isinstance(message, Plan)
            encoded = await asyncio.to_thread(encode, message) if is_long else encode(message)
            await socket.send_multipart([identity, name, encoded])

        while True:
            identity, _token, name, data = await socket.recv_multipart()
            task = asyncio.create_task(reply(identity, name, data))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    asyncio.run(serve())


# --- the two clients ------------------------------------------------------------------------------
class PlainClient:
    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self._number = 0

    def request_encoded(self, message: Message) -> bytes:
        self._number += 1
        name = self._number.to_bytes(16, "big")
        self._socket.send_multipart([b"t" * 32, name, encode(message)])
        while True:
            replied, data = self._socket.recv_multipart()
            if replied == name:
                return data


Client = PlainClient | RpcClient


def measure(connect: Callable[[], Client], pids: list[int], size: int, seconds: float) -> Result:
    client, count = connect(), 0
    client.request_encoded(AskEngine(0))
    end = (begin := time.perf_counter()) + seconds
    while time.perf_counter() < end:
        decode(client.request_encoded(AskEngine(0)))
        count += 1
    trips = count / (time.perf_counter() - begin)
    cpu, text = _cpu_s(pids), "y" * size
    request_s = _seconds(lambda: client.request_encoded(Failed(0, text)))
    reply_s = _seconds(lambda: client.request_encoded(AskEngine(LONG_REPLY)))
    cpu = _cpu_s(pids) - cpu
    return Result(trips, size / request_s / 1e6, size / reply_s / 1e6, _stall_ms(connect), cpu)


def _stall_ms(connect: Callable[[], Client]) -> float:
    """Longest small request while the plan is fetched."""
    done = threading.Event()

    def fetch() -> None:
        connect().request_encoded(AskEngine(PLAN))
        done.set()

    client, longest = connect(), 0.0
    client.request_encoded(AskEngine(0))
    threading.Thread(target=fetch, daemon=True).start()
    while not done.is_set():
        longest = max(longest, _seconds(lambda: client.request_encoded(AskEngine(0))))
    return longest * 1000


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _cpu_s(pids: list[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(one.user + one.system for one in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of small requests per round")
    parser.add_argument("--mib", type=int, default=32, help="size of long messages")
    args = parser.parse_args()
    size, keys = args.mib * 2**20, Keys.make()
    context = multiprocessing.get_context("spawn")
    kinds: dict[str, tuple[Callable[[], Client], list[int]]] = {}
    servers = []
    for name, serve in (("plain", serve_plain), ("new", serve_new)):
        here, there = context.Pipe()
        servers.append(context.Process(target=serve, args=(keys, size, there), daemon=True))
        servers[-1].start()
        endpoint, pid = here.recv(), servers[-1].pid
        assert pid is not None, "started"
        connect: Callable[[], Client] = (
            (lambda at=endpoint: PlainClient(at))  # type: ignore[misc]
            if name == "plain"
            else (lambda at=endpoint: RpcClient(at, keys, timeout_s=60.0))  # type: ignore[misc]
        )
        kinds[name] = connect, [os.getpid(), pid]
    results: dict[str, list[Result]] = {name: [] for name in kinds}
    for _ in range(args.rounds):
        for name, (connect, pids) in kinds.items():
            results[name].append(measure(connect, pids, size, args.seconds))
            print(f"{name:6}{results[name][-1]}")
    for process in servers:
        process.kill()
    for field in Result.__slots__:
        plain, new = (
            statistics.median(getattr(one, field) for one in results[name])
            for name in ("plain", "new")
        )
        print(f"{field:18}plain {plain:9.2f}   new {new:9.2f}   ratio {new / plain:.2f}")


if __name__ == "__main__":
    main()
