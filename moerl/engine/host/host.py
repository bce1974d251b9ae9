"""The host of one SGLang server: implements `moerl.core.messages.Engine`, without Ray.

It starts the server; `generation` sends it requests, checks and seals their records, and puts each
into the `mailbox`.  `health` decides whether requests may be sent; `weight_updates` changes the
weights.  Used from one event loop.

Replies of an engine host that its controller has not fetched yet.

Each rollout is handed back when it is done; replies that are done at the same time travel together.
Tokens of requests that stream wait for a reply a little longer, so they cost few messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moerl.config.lora_settings import LoraConfig
from moerl.config.schema import EngineConfig, ReplayConfig
from moerl.core.errors import EngineError, RecordError
from moerl.core.ids import life_of
from moerl.core.messages import Answers, EngineStatus, Message
from moerl.core.types import Array, GenerateRequest, ModelShape, PolicyVersion, Segment
from moerl.distributed.store_server import StoreServer
from moerl.engine.feature_table import PROVEN
from moerl.engine.host.adapter_slots import AdapterSlots, slot_arguments
from moerl.engine.host.generation import Generation
from moerl.engine.host.health import WATCH_S, EngineHealth, Heartbeat
from moerl.engine.host.server_args import SLEEPS
from moerl.engine.host.sglang_client import EngineClient
from moerl.engine.host.sglang_server import EngineServer, free_port
from moerl.engine.host.weight_updates import WeightUpdater
from moerl.engine.node_span import Follower, NodeSpan
from moerl.engine.protocol import IN_PLACE, RETRACT, RETRACT_AUDIT
from moerl.engine.weight_layout import asks_fp32_head, check_head
from moerl.records.blob_store import BlobStore
from moerl.runtime.run_dir import RunDir
from moerl.runtime.trace import Tracer

COLLECT_S = 5.0  # longest wait of `collect`, shorter than the controller's wait for this host
_GATHER_S = 0.01  # after the first reply: replies of the same forward pass travel with it
_STREAM_S = 0.05  # between two messages that have tokens of streams only


class Mailbox:
    """Used from one event loop; one controller at a time collects."""

    def __init__(self) -> None:
        self._replies: list[tuple[str, Segment | RecordError | EngineError]] = []
        self._partial: dict[str, Array] = {}  # tokens so far of requests that stream
        self._filled, self._replied = asyncio.Event(), asyncio.Event()
        self._turn = 0  # of the newest `collect`: an earlier one may be of a controller that died
        self.progress = 0

    def put(self, name: str, reply: Segment | RecordError | EngineError) -> None:
        """Add a reply.  name: `GenerateRequest.name`."""
        self._replies.append((name, reply))
        self._partial.pop(name, None)
        self.progress += isinstance(reply, Segment) and len(reply.output_ids) > 0
        self._filled.set()
        self._replied.set()

    def tell(self, name: str, output_ids: Array) -> None:
        """Replace the tokens so far of a request."""
        self._partial[name] = output_ids
        self._filled.set()

    def clear(self) -> None:
        """Drop everything: the controller that sent the requests is gone."""
        self._replies.clear()
        self._partial.clear()
        self._turn += 1

    async def collect(self) -> Answers:
        """Take all replies and tokens; wait for the first of them for at most COLLECT_S."""
        self._turn += 1
        turn = self._turn
        if not self._replies:
            self._filled.clear()
            self._replied.clear()
            if not self._partial:
                await _wait(self._filled, COLLECT_S)
            if self._partial:
                await _wait(self._replied, _STREAM_S)
            await asyncio.sleep(_GATHER_S)
        if turn != self._turn:
            return Answers((), self.progress)
        replies, self._replies = self._replies, []
        partial, self._partial = self._partial, {}
        return Answers(tuple(replies), self.progress, tuple(partial.items()))


async def _wait(event: asyncio.Event, limit_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()


log = logging.getLogger(__name__)

_INTERRUPT_S = 8.0  # shorter than the controller's wait for this host
_LOAD_S = 5.0  # seconds between looks at the server's counters


@dataclass(frozen=True, slots=True)
class EngineContext:
    """Objects that all engines of a run share."""

    model_path: Path
    shape: ModelShape
    replay: ReplayConfig
    run: RunDir
    token: str = field(repr=False)
    in_flight_mode: str = "abort_resume"
    lora: LoraConfig = field(default_factory=LoraConfig)
    fp32_head: bool = False  # of the trainer; engines must have the same
    support: int = 0  # as in Generation
    entropies: bool = False
    sleeps: bool = False  # engines give their memory back while the trainer trains
    # CUDA_VISIBLE_DEVICES of the servers; empty: they inherit it, as Ray sets it on a cluster
    devices: dict[str, str] = field(default_factory=dict)

    @property
    def routing(self) -> bool:
        """Whether the engine's routes are recorded."""
        return self.replay.routing == "R3" and bool(self.shape.moe_layers)

    def server(
        self, config: EngineConfig, version: PolicyVersion, log_file: str, span: NodeSpan
    ) -> EngineServer:
        """A node's part of an engine's server, not started yet."""
        server = EngineServer(
            config,
            self.model_path,
            routing=self.routing,
            version=str(version),
            token=self.token,
            log=self.run.logs / log_file,
            span=span,
        )
        if self.sleeps:
            server.args |= SLEEPS
        return server


class EngineHost:
    """One engine.  Raises EngineError with cause and log tail once its server is dead.

    Raises ConfigError where its head and the trainer's differ.
    """

    features = PROVEN  # deployment features proven with replay; any other is refused

    def __init__(
        self,
        index: int,
        config: EngineConfig,
        context: EngineContext,
        store: BlobStore,
        followers: Sequence[Follower] = (),
    ) -> None:
        """`start` starts the server.  followers: the engine's other nodes, by node rank from 1."""
        check_head(asks_fp32_head(config.args), trainer_fp32=context.fp32_head)
        replay, run = context.replay, context.run
        self.index, self.config, self._context, self._store = index, config, context, store
        self._routing = context.routing
        self._tracer = Tracer(run.trace, f"engine{index}")
        retract = RETRACT_AUDIT if replay.audit else RETRACT
        modes = {"in_place": IN_PLACE, "retract": retract}
        mode = modes.get(context.in_flight_mode, "")
        self._health = EngineHealth(index)
        self._followers = followers
        self._ranks_meet: StoreServer | None = None  # of an engine on several nodes
        slots = AdapterSlots(context.lora.slots) if context.lora.serves_adapters else None
        self._updates = WeightUpdater(
            self._health, self._tracer, mode=mode, slots=slots, followers=self._followers
        )
        self.session = self._updates.session  # of a publish
        self.move_memory = self._updates.move_memory
        self._generation = Generation(
            context.shape,
            store,
            self._health,
            self._updates,
            self._tracer,
            routing=self._routing,
            support=context.support,
            entropies=context.entropies,
        )
        self._mailbox = Mailbox()
        self._running: set[asyncio.Task[None]] = set()
        self._layout = ""
        self._server: EngineServer | None = None
        self._client: EngineClient | None = None
        self._watch: asyncio.Task[None] | None = None
        self._load: asyncio.Task[None] | None = None
        self._far: list[asyncio.Task[None]] = []  # watches of the other nodes
        self._life = -1  # of the newest controller that took over

    # --- life ------------------------------------------------------------------------------------
    async def start(self, version: PolicyVersion) -> EngineStatus:
        """Start a server that serves the model folder as `version`; also restarts a dead one."""
        await self.stop()
        with self._tracer.span("start"):
            span = self._span()
            server = self._context.server(self.config, version, f"engine{self.index}.log", span)
            if self._context.lora.serves_adapters:
                server.args |= slot_arguments(self._context.lora, server.args)
            client = EngineClient(server.url)
            try:
                await self._start_all_nodes(server.start(client), version, span)
            except BaseException:
                await client.close()
                raise
        assert server.layout is not None, "a started server has a layout"
        self._layout = server.layout.fingerprint()
        log.info("engine %d: weight layout %s: %s", self.index, self._layout, server.layout)
        self._server, self._client = server, client
        self._generation.client, self._generation.records = client, server.records
        self._updates.attach(server, client, version)
        self._health.open()
        self._far = [asyncio.ensure_future(node.watch()) for node in self._followers]
        self._watch = asyncio.create_task(self._watch_server(server, client))
        self._load = asyncio.create_task(self._watch_load(client))
        return await self.status()

    async def stop(self) -> None:
        """End the server and its processes; without a server it does nothing."""
        self._health.close("it was stopped")
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineError):
                await self._watch
        for watch in self._far:
            watch.cancel()
        await asyncio.gather(*self._far, return_exceptions=True)
        self._watch, self._far = None, []
        if self._load is not None:
            self._load.cancel()
            await asyncio.gather(self._load, return_exceptions=True)
        self._updates.detach()
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            await self._server.stop()
            await self._stop_other_nodes()
        if self._ranks_meet is not None:
            self._ranks_meet.close()
        self._client = self._server = self._ranks_meet = None

    def _span(self) -> NodeSpan:
        """This node's part of the engine; on several nodes with a new store for its ranks."""
        if not self._followers:
            return NodeSpan(devices=self._context.devices)
        host = self.config.host
        self._ranks_meet = StoreServer(host)
        head = f"{host}:{free_port(host)}"
        return NodeSpan(0, 1 + len(self._followers), head, self._ranks_meet.server_address)

    async def _start_all_nodes(
        self, start: Coroutine[Any, Any, None], version: PolicyVersion, span: NodeSpan
    ) -> None:
        """Start the servers of all nodes.

        start: start of this node's server.  Raises EngineError with the first cause; then no node
        has a server.
        """
        spans = [replace(span, node=node) for node in range(1, span.nodes)]
        starts = [asyncio.ensure_future(start)]
        starts += [
            asyncio.ensure_future(node.start(version, span))
            for node, span in zip(self._followers, spans, strict=True)
        ]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for one in starts:
                one.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self._stop_other_nodes()
            raise

    async def _stop_other_nodes(self) -> None:
        stops = (node.stop() for node in self._followers)
        for end in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(end, BaseException):  # the node is gone, and its server with it
                log.warning("engine %d: a node was not told to stop: %s", self.index, end)

    @property
    def node(self) -> str:
        """Node from which the sealed records are read."""
        return self._store.node

    async def status(self) -> EngineStatus:
        return EngineStatus(
            engine=self.index,
            version=self._updates.version,
            pid=self._server.pid if self._server else 0,
            running=self._health.running,
            generated_tokens=self._generation.tokens,
            busy_s=self._health.busy_s,
            refused=dict(self._generation.refused),
            layout=self._layout,
        )

    async def watch(self) -> None:
        """Never returns; raises EngineError when the engine breaks for good."""
        await self._health.ended.wait()
        raise self._health.failure()

    # --- generation ------------------------------------------------------------------------------
    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Run requests; their replies go to the mailbox, each when it is done.

        During a weight update they wait, and are then sent to the new version.
        """
        work = self._generation.run(requests, self._deliver, self._tell)
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _deliver(
        self, request: GenerateRequest, reply: Segment | RecordError | EngineError
    ) -> None:
        self._mailbox.put(request.name, reply)

    def _tell(self, request: GenerateRequest, output_ids: Array) -> None:
        self._mailbox.tell(request.name, output_ids)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("engine %d: requests ended", self.index, exc_info=error)
            self._health.close(f"a bug in its host: {error!r}")

    async def collect(self) -> Answers:
        """Replies since the last call; waits a few seconds for the first one."""
        return await self._mailbox.collect()

    async def abort(self, names: Sequence[str]) -> None:
        """Interrupt these requests: their tokens so far go to the mailbox.

        Raises EngineError also when the server does not answer in time.
        """
        await self._in_time(self._generation.abort(names), "abort")

    async def generate(
        self, requests: Sequence[GenerateRequest], on_tokens: Callable[[Array], None] | None = None
    ) -> list[Segment | RecordError]:
        """Replies to all requests, in order.  Raises EngineError when one fails, and ends the rest.

        A record that breaks the contract is returned as its RecordError, without effect on the
        others.
        on_tokens: receives the tokens so far of the streamed request.
        """
        replies: dict[str, Segment | RecordError] = {}

        def take(request: GenerateRequest, reply: Segment | RecordError | EngineError) -> None:
            if isinstance(reply, EngineError):
                raise reply
            replies[request.name] = reply

        def tell(request: GenerateRequest, output_ids: Array) -> None:
            if on_tokens is not None:
                on_tokens(output_ids)

        await self._generation.run(requests, take, tell)
        return [replies[request.name] for request in requests]

    async def stream(
        self, request: GenerateRequest, on_tokens: Callable[[Array], None]
    ) -> Segment | RecordError:
        """As `generate`, of one request that streams."""
        (reply,) = await self.generate([request], on_tokens)
        return reply

    async def forget(self, kept: Sequence[str] | None, life: int) -> None:
        """A new controller takes over: end the calls of its predecessor and seal none of them.

        kept: blobs that the new controller knows, on any node; other blobs of earlier controllers
        are deleted from this store.  None: no blob is deleted.
        life: number of controllers before the new one; a message of an earlier controller is
        ignored.  0: the journal of earlier controllers is lost.

        The controller does not wait long for this call.  Engines of one machine share a store, in
        which they may already seal blobs for the new controller: only blobs that exist now, under
        names of earlier lives, are deleted.
        """
        if 0 < life < self._life:
            log.warning("engine %d: controller %d takes over too late", self.index, life)
            return
        self._life = life
        self._generation.forget()
        self._mailbox.clear()
        left = [] if kept is None else self._left_behind(set(kept), life)
        with contextlib.suppress(EngineError):  # an unusable server has no calls to end
            await self.interrupt()
        await asyncio.to_thread(self._store.delete_all, left)

    def _left_behind(self, kept: set[str], life: int) -> list[str]:
        """Blobs of earlier controllers that are not kept."""
        others = [uri for uri in self._store.uris() if uri not in kept]
        return [uri for uri in others if life_of(uri) < life or not life]

    async def interrupt(self) -> None:
        """End the running requests: each returns its tokens so far, to be continued elsewhere.

        Raises EngineError also when the server does not answer in time.
        """
        await self._in_time(self._alive().abort_all(), "interrupt")

    async def _in_time(self, work: Awaitable[None], what: str) -> None:
        try:
            async with asyncio.timeout(_INTERRUPT_S):
                await self._health.guard(work)
        except TimeoutError as error:
            raise EngineError(f"engine {self.index}: no {what} in {_INTERRUPT_S:g} s") from error

    # --- failure ---------------------------------------------------------------------------------
    async def _watch_server(self, server: EngineServer, client: EngineClient) -> None:
        pulse, updates = Heartbeat(client.pulse, self.config.answer_timeout_s), self._updates
        cause: str | None = None
        try:
            while cause is None:
                await asyncio.sleep(WATCH_S)
                hangs = pulse.check(attempt=updates.attempt, answers=updates.answered)
                cause = server.death() or self._far_death() or hangs
        finally:
            pulse.close()
        self._health.close(f"{cause}\n{server.log_tail()}")

    async def _watch_load(self, client: EngineClient) -> None:
        """Progress of requests that have not ended: the server's counters move."""
        last: object = None
        while True:
            await asyncio.sleep(_LOAD_S)
            if self._generation.records is not None:
                await asyncio.to_thread(self._generation.records.sweep)
            if self._health.is_asleep:  # no limit of progress
                self._mailbox.progress += 1
            if self._health.is_asleep or not self._health.running:
                continue
            with contextlib.suppress(EngineError):
                now = (await client.work_done(), self._updates.answered)
                self._mailbox.progress += now != last
                last = now

    def _far_death(self) -> str | None:
        """Why the part of another node is dead."""
        ended = next((watch for watch in self._far if watch.done()), None)
        return None if ended is None else str(ended.exception())

    def _alive(self) -> EngineClient:
        self._health.usable()
        if self._client is None:
            raise self._health.failure()
        return self._client


# --- further nodes --------------------------------------------------------------------------------
class EngineFollower:
    """Implements `moerl.engine.node_span.Follower` on a further node of an engine.

    It starts its part of the server and asks the receivers of its ranks.  A follower has no
    requests and no records: SGLang sends both through node 0, whose host asks it over Ray.
    """

    def __init__(self, index: int, config: EngineConfig, context: EngineContext) -> None:
        self._index, self._config, self._context = index, config, context
        self._server: EngineServer | None = None

    async def start(self, version: PolicyVersion, span: NodeSpan) -> None:
        await self.stop()
        log_file = f"engine{self._index}-node{span.node}.log"
        server = self._server = self._context.server(self._config, version, log_file, span)
        client = EngineClient(server.url)
        try:
            await server.start(client)
        finally:
            await client.close()

    async def receive(self, message: Message) -> list[Message]:
        return await WeightUpdater.ask_receivers(self._alive(), message)

    async def watch(self) -> None:
        server = self._alive()
        while (cause := server.death()) is None:
            await asyncio.sleep(WATCH_S)
        raise EngineError(f"on node {server.span.node}: {cause}\n{server.log_tail()}")

    async def stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop()

    def _alive(self) -> EngineServer:
        if self._server is None:
            raise EngineError(f"engine {self._index}: a node of it has no server")
        return self._server
