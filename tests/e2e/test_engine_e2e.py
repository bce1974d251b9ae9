"""A real SGLang server against transformers: records, resumption, updates, token, death.

One server serves the whole file, in order; the last test kills it.  Servers whose start fails are
forks of one process (tests/helpers/warm_engines.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import aiohttp
import numpy as np
import psutil
import pytest
import torch

from moerl.config.schema import EngineConfig, ReplayConfig
from moerl.core.errors import ConfigError, EngineError, ProtocolError, RecordError
from moerl.core.messages import AbortUpdate, Ok, UpdateDone
from moerl.core.rpc import Keys, RpcClient
from moerl.core.types import Finish, GenerateRequest, PolicyVersion, SamplingParams, Segment
from moerl.engine.host.host import EngineContext, EngineHost
from moerl.engine.host.sglang_client import EngineClient
from moerl.engine.host.sglang_server import EngineServer
from moerl.engine.plugin.hooks import HOOKS
from moerl.engine.weight_layout import LiveWeightLayout
from moerl.records.blob_store import BlobStore
from moerl.runtime.run_dir import RunDir
from tests.helpers import engine_tiny_model as tiny
from tests.helpers.live_checksums import checksums
from tests.helpers.patience import patience
from tests.helpers.session_publisher import Publisher

if TYPE_CHECKING:
    from tests.helpers.warm_engines import WarmEngines

pytestmark = pytest.mark.e2e

TOKEN = "e2e-run-token"
OPEN_ROUTES = {"GET /health", "GET /ready"}  # they only say that the server runs
V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
TRUNCATED = SamplingParams(24, temperature=0.8, top_p=0.9, top_k=40, ignore_eos=True)
FULL = SamplingParams(24, temperature=1.3, ignore_eos=True)
T = TypeVar("T")


class World:
    """A host with its event loop, and the weights it may serve."""

    def __init__(self, root: Path) -> None:
        torch.set_num_threads(1)
        self.root = root
        self.loop = asyncio.new_event_loop()
        self.folders = {V0: tiny.save(root / "A", 0), V1: tiny.save(root / "B", 1)}
        self.models = {version: tiny.load(folder) for version, folder in self.folders.items()}
        self.store = BlobStore(root / "blobs", "node0")
        self.config = EngineConfig(args={"chunked_prefill_size": 64}, max_total_tokens=16384)
        run = RunDir(root / "run")
        run.create()
        self.log = run.logs / "engine0.log"
        context = EngineContext(self.folders[V0], tiny.SHAPE, ReplayConfig(), run, TOKEN)
        self.host = EngineHost(0, self.config, context, self.store)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, patience(timeout_s)))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("engine"))
    try:
        world.run(world.host.start(V0), 240.0)
        yield world
    finally:
        world.run(world.host.stop())
        world.loop.close()


def request(name: str, length: int, sampling: SamplingParams, seed: int = 0) -> GenerateRequest:
    ids = np.random.RandomState(seed).randint(4, tiny.VOCAB, size=length).astype(np.int32)
    return GenerateRequest(name, 0, ids, 0, sampling)


def resume(
    partial: GenerateRequest, got: Segment, sampling: SamplingParams, *, audit: bool = False
) -> GenerateRequest:
    ids = np.concatenate([partial.token_ids, got.output_ids])
    sampled = partial.num_sampled + len(got.output_ids)
    return GenerateRequest(partial.rollout_id, partial.segment + 1, ids, sampled, sampling, audit)


def check_segment(world: World, ask: GenerateRequest, got: Segment | RecordError) -> float:
    """Compare one segment with transformers; returns the largest log-probability difference."""
    assert isinstance(got, Segment), got
    ids = [*ask.token_ids.tolist(), *got.output_ids.tolist()]
    logits, routes = tiny.forward(world.models[got.version], ids)
    logp = (logits / ask.sampling.temperature).log_softmax(-1)
    first = len(ask.token_ids) - 1  # the fed-in token that produced the first sampled one
    if ask.sampling.truncates:
        assert got.sampling_mask is not None
        offsets = world.store.load(got.sampling_mask.offsets)
        kept = world.store.load(got.sampling_mask.ids)
        assert got.sampling_mask.first == ask.num_sampled
    else:
        assert got.sampling_mask is None
    want = []
    for step, token in enumerate(got.output_ids.tolist()):
        row = logp[first + step]
        if ask.sampling.truncates:
            probs, order = row.exp().sort(descending=True)
            keep = probs.cumsum(0) - probs <= ask.sampling.top_p
            keep[ask.sampling.top_k :] = False
            support = order[keep].sort().values
            assert kept[offsets[step] : offsets[step + 1]].tolist() == support.tolist()
            row = row - row[support].logsumexp(0)
        want.append(row[token].item())
    assert got.routing is not None
    rows = world.store.load(got.routing.ids)
    assert (got.routing.row_begin, got.routing.row_end) == (ask.rows_from, len(ids) - 1)
    np.testing.assert_array_equal(rows, routes[:, ask.rows_from : len(ids) - 1])
    logprobs = world.store.load(got.sealed_logprobs.values)
    return float(np.abs(logprobs - np.asarray(want, np.float32)).max())


def test_every_hook_found_its_target(world: World) -> None:
    """SGLang only warns about a hook whose target is gone; then a new version moved it."""
    applied = [line for line in world.log.read_text().splitlines() if "plugin=moerl_hooks" in line]
    plain = [hook for hook in HOOKS if hook.when.applies(cuda=False, dp_attention=False)]
    assert len(applied) == len(plain)


def test_the_status_names_the_layout_of_the_weights(world: World) -> None:
    layout = LiveWeightLayout("0.5.23", "qwen3_moe", 1, 1, 1, "triton", "none", "float32", ())
    assert world.run(world.host.status()).layout == layout.fingerprint()


@pytest.mark.parametrize("sampling", [TRUNCATED, FULL], ids=["truncated", "full"])
def test_records_equal_transformers(world: World, sampling: SamplingParams) -> None:
    """Chunked prefill (200 > 64 tokens) and prefix-cache hits (sent twice) included."""
    tag = "t" if sampling.truncates else "f"
    lengths = (1, 5, 33, 200)
    for attempt in range(2):
        asks = [request(f"rec{tag}{attempt}.{n}", n, sampling, seed=n) for n in lengths]
        got = world.run(world.host.generate(asks))
        assert max(check_segment(world, *pair) for pair in zip(asks, got, strict=True)) < 5e-5
        assert [segment.finish for segment in got] == [Finish.LENGTH] * len(asks)
    assert got[-1].cached_tokens > 100


@pytest.mark.parametrize("sampling", [TRUNCATED, FULL], ids=["truncated", "full"])
@pytest.mark.parametrize("length", [5, 200], ids=["short", "file"])
def test_log_probabilities_of_a_support_equal_transformers(
    world: World, monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams, length: int
) -> None:
    """Of all kept entries, or of the 12 likeliest."""
    monkeypatch.setattr(world.host._generation, "_support", 12)
    sampling = replace(sampling, max_new_tokens=length)
    asks = [request(f"sup{sampling.truncates:d}{length}.{n}", n, sampling, seed=n) for n in (3, 40)]
    for ask, got in zip(asks, world.run(world.host.generate(asks)), strict=True):
        assert isinstance(got, Segment), got
        assert check_segment(world, ask, got) < 5e-5
        part = got.sampling_mask if sampling.truncates else got.top_logprobs
        assert part is not None
        assert part.logprobs is not None
        offsets, ids, found = map(world.store.load, (part.offsets, part.ids, part.logprobs))
        assert found.dtype == np.float16
        logits, _ = tiny.forward(world.models[V0], [*ask.token_ids.tolist(), *got.output_ids])
        logp = (logits / sampling.temperature).log_softmax(-1)[len(ask.token_ids) - 1 :]
        for step in range(length):
            row = torch.from_numpy(ids[offsets[step] : offsets[step + 1]].astype(np.int64))
            want = logp[step, row]
            if sampling.truncates:
                want = want - want.logsumexp(0)
            else:
                assert row.tolist() == sorted(logp[step].topk(12).indices.tolist())
            here = torch.from_numpy(found[offsets[step] : offsets[step + 1]].astype(np.float32))
            torch.testing.assert_close(here, want, rtol=6e-4, atol=1e-4)


def test_stop_token_ends_a_sequence(world: World) -> None:
    ask = request("stop.0", 8, SamplingParams(64, stop_token_ids=tuple(range(64, 256))))
    (got,) = world.run(world.host.generate([ask]))
    assert check_segment(world, ask, got) < 5e-5
    assert got.finish is Finish.STOP
    assert got.output_ids[-1] >= 64 or got.output_ids[-1] == tiny.EOS


async def prefilled(world: World, seen: int) -> None:
    """Wait until the server prefilled again after `seen` times, and then for a few tokens more."""
    while prefills(world) <= seen:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)


def prefills(world: World) -> int:
    return batches(world, "Prefill")


def batches(world: World, kind: Literal["Prefill", "Decode"]) -> int:
    return world.log.read_text().count(f"{kind} batch")


def test_progress_shows_in_the_load_report(world: World) -> None:
    """It is the only sign of a request that takes long; control: an idle server shows none."""
    client = world.host._client
    assert client is not None
    before = world.run(client.work_done())
    assert before
    assert world.run(client.work_done()) == before
    world.run(world.host.generate([request("progress.0", 20, TRUNCATED)]))
    assert world.run(client.work_done()) != before


def test_one_request_is_aborted_alone(world: World) -> None:
    """By its name; the other one is handed back when it is done, and the first one continues."""
    endless = SamplingParams(4000, temperature=0.8, top_p=0.9, top_k=40, ignore_eos=True)
    asks = [request("one.0", 12, endless), request("one.1", 14, replace(endless, max_new_tokens=9))]

    async def scenario() -> dict[str, Segment]:
        await world.host.submit(asks)
        got: dict[str, Segment] = {}
        while len(got) < 2:
            for name, reply in (await world.host.collect()).replies:
                assert isinstance(reply, Segment), reply
                got[name] = reply
                await world.host.abort(["one.0-s0"])
        return got

    got = world.run(scenario())
    assert list(got) == ["one.1-s0", "one.0-s0"]
    assert got["one.1-s0"].finish is Finish.LENGTH
    assert got["one.0-s0"].finish is Finish.ABORT
    for ask, segment in zip(asks, (got["one.0-s0"], got["one.1-s0"]), strict=True):
        assert check_segment(world, ask, segment) < 5e-5


def test_abort_and_resume(world: World) -> None:
    """Rows of a partial and its resumption tile the sequence; audit adds the prefix rows."""
    long = SamplingParams(600, temperature=0.8, top_p=0.9, top_k=40, ignore_eos=True)
    asks = [request(f"abort.{i}", 10 + i, long, seed=i) for i in range(3)]

    async def interrupted() -> list[Segment | RecordError]:
        seen = prefills(world)
        running = asyncio.create_task(world.host.generate(asks))
        await prefilled(world, seen)
        client = world.host._client
        assert client is not None
        await client.abort_all()
        return await running

    partials = world.run(interrupted())
    for ask, partial in zip(asks, partials, strict=True):
        assert check_segment(world, ask, partial) < 5e-5
        assert partial.finish is Finish.ABORT
        assert 0 < len(partial.output_ids) < 600
    # Different lengths (so different first rows) in one generate call, one of them audited.
    resumed = [
        resume(ask, partial, TRUNCATED, audit=ask is asks[0])
        for ask, partial in zip(asks, partials, strict=True)
    ]
    finished = world.run(world.host.generate(resumed))
    for ask, partial, again, rest in zip(asks, partials, resumed, finished, strict=True):
        assert check_segment(world, again, rest) < 5e-5
        assert partial.routing.row_end == rest.routing.row_begin == len(again.token_ids) - 1
        assert partial.routing.row_begin == 0
        assert rest.rollout_id == ask.rollout_id
    audited = finished[0].audit_rows
    assert (audited.row_begin, audited.row_end) == (0, partials[0].routing.row_end)
    np.testing.assert_array_equal(
        world.store.load(audited.ids), world.store.load(partials[0].routing.ids)
    )
    assert finished[1].audit_rows is None


def test_no_record_file_is_left(world: World) -> None:
    """Not by the requests before this one, which ended and were aborted, nor by a call given up."""
    long = SamplingParams(2500, top_p=0.9, top_k=40, ignore_eos=True)

    server = world.host._server
    assert server is not None
    assert server.records is not None
    records, sweep, removed = server.records, server.records.sweep, list[int]()

    def counted() -> None:  # the host calls it every few seconds, too
        removed.append(sweep())

    async def scenario() -> None:
        seen = batches(world, "Decode")
        # the rows of the prompt alone need a file; while it is prefilled in parts there are none
        call = asyncio.create_task(world.host.generate([request("61.0", 1000, long)]))
        while batches(world, "Decode") <= seen:
            await asyncio.sleep(0.05)
        call.cancel()  # the server ends the request when it notices, and writes what it has
        await asyncio.gather(call, return_exceptions=True)
        while not any(removed):
            await asyncio.sleep(0.05)
            counted()

    assert os.listdir(records._folder) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "sweep", counted)
        world.run(scenario())
    assert os.listdir(records._folder) == []
    assert sum(removed) == 1


def test_a_refused_request_does_not_sink_the_batch(world: World) -> None:
    asks = [request("ok.0", 5, TRUNCATED), request("toolong.0", 5000, TRUNCATED)]
    good, bad = world.run(world.host.generate(asks))
    assert check_segment(world, asks[0], good) < 5e-5
    assert isinstance(bad, RecordError)
    assert bad.reason == "request"
    assert world.run(world.host.status()).refused == {"request": 1}


def test_token_is_required_and_hidden(world: World) -> None:
    server = world.host._server
    assert server is not None
    paths = (
        "/generate",
        "/abort_request",
        "/flush_cache",
        "/init_weights_update_group",
        "/begin_weight_update",
        "/update_weights_from_distributed",
        "/update_weights_from_tensor",
        "/end_weight_update",
        "/weights_checker",
        "/pause_generation",
    )

    async def statuses(headers: dict[str, str]) -> list[int]:
        async with aiohttp.ClientSession(server.url, headers=headers) as session:
            replies = [await session.post(path, json={}) for path in paths]
            replies.append(await session.get("/model_info"))
            return [reply.status for reply in replies]

    assert set(world.run(statuses({}))) <= {401, 403}
    assert set(world.run(statuses({"Authorization": "Bearer guess"}))) <= {401, 403}
    for process in server._tree():
        assert TOKEN not in " ".join(process.cmdline())
        assert TOKEN not in process.environ().values()
    assert TOKEN not in world.log.read_text()


def test_every_route_wants_the_token(world: World) -> None:
    """The routes that SGLang itself lists, so that a new version's new ones are met too."""
    server = world.host._server
    assert server is not None

    async def answers() -> dict[str, int]:
        token = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(server.url, headers=token) as session:
            reply = await session.get("/openapi.json")
            routes = (await reply.json())["paths"]
        statuses = {}
        async with aiohttp.ClientSession(server.url) as session:
            for path, methods in routes.items():
                for method in methods:
                    reply = await session.request(method.upper(), path.split("{")[0], json={})
                    statuses[f"{method.upper()} {path}"] = reply.status
        return statuses

    statuses = world.run(answers(), 120.0)
    assert sum("weights" in route for route in statuses) >= 8  # these are the update endpoints
    open_routes = {route for route, status in statuses.items() if status not in (401, 403)}
    assert open_routes <= OPEN_ROUTES


def test_receivers_want_the_servers_keys(world: World) -> None:
    """The socket of a scheduler: this user's only, and nobody without the keys gets an answer."""
    server = world.host._server
    assert server is not None
    sockets, keys = server.receiver_sockets, server.receiver_keys
    assert len(sockets) == world.config.tp
    for path in sockets:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE((path.parent / "keys").stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        abort = AbortUpdate(0, V1, "a stranger", 5.0)
        stranger = RpcClient(f"ipc://{path}", Keys(keys.server, Keys.make().client), timeout_s=1.0)
        with pytest.raises(ProtocolError, match="did not answer"):
            stranger.request(abort)
        ours = RpcClient(f"ipc://{path}", keys, timeout_s=20.0)
        assert ours.request(abort) == Ok()
        ours.close()


def test_ports_are_ours_and_on_loopback(world: World) -> None:
    """Its ranks meet in a file: torch's TCPStore (nccl_port) would listen on every interface."""
    server = world.host._server
    assert server is not None
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for process in server._tree()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert ("127.0.0.1", server.port) in listening
    assert {address for address, _ in listening} == {"127.0.0.1"}
    assert server.args["nccl_port"] not in {port for _, port in listening}


def test_update_interrupts_and_serves_the_new_weights(world: World) -> None:
    long = SamplingParams(800, temperature=0.8, top_p=0.9, top_k=40, ignore_eos=True)
    asks = [request(f"upd.{i}", 8, long, seed=i) for i in range(4)]
    before = world.run(checksums(world.host))

    async def update() -> tuple[UpdateDone, list[Segment], list[Segment]]:
        host = world.host
        publisher = Publisher(host, world.folders)
        await publisher.stage(V1)
        seen = prefills(world)
        running = asyncio.create_task(host.generate(asks))
        await prefilled(world, seen)
        committing = asyncio.create_task(publisher.commit(V1))
        while host._health.admit.is_set():
            await asyncio.sleep(0)
        held = asyncio.create_task(host.generate([request("held.0", 9, TRUNCATED)]))
        return await committing, await running, await held

    closed, partials, held = world.run(update())
    assert closed.aborted == 4
    assert 0 < closed.pause_s < 30
    for ask, partial in zip(asks, partials, strict=True):
        assert (partial.version, partial.finish) == (V0, Finish.ABORT)
        assert check_segment(world, ask, partial) < 5e-5
    assert held[0].version == V1
    assert check_segment(world, request("held.0", 9, TRUNCATED), held[0]) < 5e-5
    resumed = [resume(*pair, FULL) for pair in zip(asks, partials, strict=True)]
    logged = len(world.log.read_text())
    finished = world.run(world.host.generate(resumed))
    prefilled_again = re.findall(r"#new-token: (\d+)", world.log.read_text()[logged:])
    told = sum(len(a.token_ids) - r.cached_tokens for a, r in zip(resumed, finished, strict=True))
    assert sum(map(int, prefilled_again)) == told, "cached_tokens is not what was left out"
    for again, rest in zip(resumed, finished, strict=True):
        assert rest.version == V1
        assert check_segment(world, again, rest) < 5e-5
    assert world.run(checksums(world.host)) != before
    # Negative control: under the old weights the same check must see the difference.
    world.models[V1] = world.models[V0]
    with pytest.raises(AssertionError):
        assert check_segment(world, resumed[0], finished[0]) < 5e-5


def test_start_failures_name_the_cause(
    world: World, tmp_path: Path, warm_engines: WarmEngines
) -> None:
    """No folder at once; unloadable weights and a taken port as soon as the server gave up."""
    (tmp_path / "empty").mkdir()
    config = json.loads((world.folders[V0] / "config.json").read_text())
    (tmp_path / "empty" / "config.json").write_text(json.dumps(config))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with warm_engines.serving():
            results = world.run(
                asyncio_gather(
                    _start(world, tmp_path / "absent", tmp_path / "absent.log"),
                    _start(world, tmp_path / "empty", tmp_path / "empty.log"),
                    _start(world, world.folders[V0], tmp_path / "port.log", port=port),
                ),
                200.0,
            )
    absent, empty, port_error = (text.splitlines() for text in results)
    assert absent == [f"engine: model folder {tmp_path / 'absent'} has no config.json"]
    assert "Cannot find any model weights" in empty[0]
    assert empty[1].startswith("--- end of")
    assert port_error == [f"engine: port {port} on 127.0.0.1 is in use"]


def test_weights_in_another_layout_end_the_start(
    world: World, tmp_path: Path, warm_engines: WarmEngines
) -> None:
    """The scheduler process refuses its own modules; what they do not show, the arguments do."""
    swapped = EngineConfig(args={"moe_runner_backend": "flashinfer_cutlass"})
    recut = EngineConfig(args={"enable_dense_mlp_attn_tp": True})
    with warm_engines.serving():
        by_modules, by_arguments = world.run(
            asyncio_gather(
                _start(world, world.folders[V0], tmp_path / "swapped.log", config=swapped),
                _start(world, world.folders[V0], tmp_path / "recut.log", config=recut),
            ),
            200.0,
        )
    flag = "use_flashinfer_cutlass of UnquantizedFusedMoEMethod keeps w13 as [up; gate]"
    assert by_modules.splitlines()[0].endswith(f"model.layers.0.mlp.experts: {flag}")
    assert by_arguments == (
        "engine.args.enable_dense_mlp_attn_tp = True is not usable: "
        "dense layers are then cut as attention is; allowed: False"
    )


async def asyncio_gather(*work: Coroutine[Any, Any, T]) -> list[T]:
    return list(await asyncio.gather(*work))


async def _start(
    world: World,
    folder: Path,
    log: Path,
    port: int | None = None,
    config: EngineConfig | None = None,
) -> str:
    server = EngineServer(
        config or world.config,
        folder,
        routing=True,
        version="0.0",
        token=TOKEN,
        log=log,
        port=port,
    )
    client = EngineClient(server.url)
    try:
        await server.start(client)
    except (ConfigError, EngineError) as error:
        return str(error)
    finally:
        await client.close()
        await server.stop()
    return "started"


HOST_SCRIPT = """
import asyncio, sys
from pathlib import Path
from moerl.records.blob_store import BlobStore
from moerl.config.schema import EngineConfig, ReplayConfig
from moerl.engine.host.host import EngineContext, EngineHost
from moerl.runtime.run_dir import RunDir
from moerl.core.types import ModelShape, PolicyVersion

async def main(root, model):
    run = RunDir(root)
    run.create()
    shape = ModelShape(256, 3, (0, 1, 2), 8, 2)
    context = EngineContext(model, shape, ReplayConfig(), run, "token")
    config, store = EngineConfig(max_total_tokens=4096), BlobStore(root / "blobs", "n")
    host = EngineHost(1, config, context, store)
    await host.start(PolicyVersion(0, 0))
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
"""


def test_killed_host_leaves_no_server(world: World, tmp_path: Path) -> None:
    host = subprocess.Popen(
        [sys.executable, "-c", HOST_SCRIPT, str(tmp_path), str(world.folders[V0])],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert host.stdout is not None
        assert host.stdout.readline() == "ready\n"
        below = psutil.Process(host.pid).children(recursive=True)
        assert len(below) >= 3  # server, scheduler, detokenizer
    finally:
        host.kill()
        host.wait()
    _, alive = psutil.wait_procs(below, timeout=patience(10))
    assert not alive


def test_killed_server_fails_calls_with_its_cause(world: World) -> None:
    """Last: it ends the shared server.  A running and a later call both see the cause."""
    server = world.host._server
    assert server is not None
    below = server._tree()

    async def killed() -> None:
        ask = request("killed.0", 8, SamplingParams(3000, ignore_eos=True))
        running = asyncio.create_task(world.host.generate([ask]))
        await asyncio.sleep(0.3)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="killed by signal 9"):
            await running
        with pytest.raises(EngineError, match="killed by signal 9"):
            await world.host.generate([ask])

    assert server._scratch is not None
    shared = json.loads((server._scratch.path / "owner.lock").read_text())
    assert any("sglang_loads_" in path for path in shared)
    world.run(killed())
    world.run(world.host.stop())
    assert not any(Path(path).exists() for path in shared)
    _, alive = psutil.wait_procs(below, timeout=patience(10))
    assert not alive
