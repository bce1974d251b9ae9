"""Ray actors: thin wrappers of plain classes that are testable without Ray.

One controller, one engine host per SGLang server, one scorer.  Each actor's `watch` call returns
only when its object has ended, so the supervisor learns of a failure as soon as Ray does.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moerl.config import Config
from moerl.config.clusters import is_local, placement, visible_devices
from moerl.config.task_mixture import entries_of
from moerl.controller.context import Services
from moerl.controller.controller import Controller
from moerl.controller.step_metrics import StepReport
from moerl.core.episode_view import ScoreRequest
from moerl.core.errors import ConfigError, EngineError, MoerlError, ScoreError, ScorerDown
from moerl.core.messages import Engine, Message
from moerl.core.rpc import Keys, RpcServer
from moerl.core.types import Prompt, Score
from moerl.engine.node_span import Follower
from moerl.launch.nodes.ray_nodes import ENGINE_SLOT, this_node
from moerl.launch.run_context import RunContext, engine_environment
from moerl.launch.supervision.ray_proxy import (
    ActorProxy,
    ActorServer,
    CallTimeout,
    log_to,
    own_errors,
)
from moerl.launch.supervision.reward_actors import actor_scorer
from moerl.launch.task_agents import task_agents
from moerl.observe.alerts import Alerts
from moerl.observe.metrics import MetricsWriter, read_rows
from moerl.observe.sinks import mirrors_of
from moerl.runtime.beside import Beside, LineWriter
from moerl.runtime.trace import Tracer
from moerl.scoring import make_scorers

log = logging.getLogger(__name__)
# Calls of one actor in progress at once; more wait.  A host with as many requests would not answer
# the supervisor, which then takes it for a hung actor.
_CALLS = 1000
Plain = TypeVar("Plain")
_RETRIES = 3  # of a call whose actor died: the call may have ended it


def place(plain: type[Plain], *args: Any, restarts: int = 0) -> ActorHandle[Plain]:
    """Put an instance of a plain class on an actor on this node; calls run concurrently.

    restarts: how often Ray restarts it (-1 = always), then it repeats pending calls too, a few
    times; only for objects without state.
    """
    actor: Any = ray.remote(plain)
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": _CALLS}
    options["scheduling_strategy"] = this_node()
    if restarts:
        options |= {"max_restarts": restarts, "max_task_retries": _RETRIES}
    placed: ActorHandle[Plain] = actor.options(**options).remote(*args)
    return placed


@dataclass(frozen=True, slots=True)
class PlacedEngine:
    """An engine host, and on a cluster its slot."""

    actor: ActorHandle[EngineActor]
    slot: PlacementGroup | None
    followers: tuple[ActorHandle[FollowerActor], ...] = ()  # on its other nodes

    def give_up(self) -> None:
        """End the host and its followers, and free their slots."""
        every: tuple[ActorHandle[Any], ...] = (self.actor, *self.followers)
        for actor in every:
            with contextlib.suppress(RayError):  # its node is gone
                ray.kill(actor)
        if self.slot is not None:
            remove_placement_group(self.slot)


def place_engine(
    context: RunContext, index: int, tp: int, devices: Sequence[int] = ()
) -> PlacedEngine:
    """Start an engine host on a node that has room for the ranks of its server.

    devices: GPUs of this machine.  The nodes of a cluster offer `engine` slots and, if they have
    them, GPUs; a placement group takes one slot and the GPUs of an engine from each node that the
    engine spans.
    """
    context = context.without_tokenizer()
    if is_local(context.config.cluster):
        named = visible_devices(devices)
        return PlacedEngine(place(EngineActor, context, index, tp, (), named), None)
    nodes = context.config.engine.nodes
    has_gpus = any(slot.devices for slot in placement(context.config).engines)
    each = tp // nodes if has_gpus else 0
    bundle: dict[str, float] = {ENGINE_SLOT: 1.0}
    if each:
        bundle["GPU"] = each
    strategy = "STRICT_SPREAD" if nodes > 1 else "STRICT_PACK"
    group = placement_group([bundle] * nodes, strategy=strategy)

    def start_actor(plain: Any, node: int, *args: object) -> Any:
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": _CALLS, "num_gpus": each}
        options |= {"resources": {ENGINE_SLOT: 1}, "scheduling_strategy": where}
        return ray.remote(plain).options(**options).remote(context, index, tp, *args)

    followers = tuple(start_actor(FollowerActor, node, node) for node in range(1, nodes))
    return PlacedEngine(start_actor(EngineActor, 0, followers), group, followers)


class EngineActor(ActorServer):
    """One engine host: starts its SGLang server, sends it HTTP requests, seals its records."""

    def __init__(
        self,
        context: RunContext,
        index: int,
        tp: int,
        followers: Sequence[ActorHandle[FollowerActor]] = (),
        devices: Mapping[str, str] | None = None,
    ) -> None:
        """Make the engine host in this process.

        followers: on the engine's other nodes, by node.  devices: variables that name its GPUs,
        where Ray has not set them.
        """
        _begin_engine_process(context, f"engine-{index}.host.log")
        self._followers = followers
        self._host = context.engine_host(
            index,
            tp,
            [
                cast(Follower, ActorProxy(actor, f"node {node} of engine {index}"))
                for node, actor in enumerate(followers, 1)
            ],
            devices,
        )
        super().__init__(self._host)
        gc.collect()
        gc.freeze()  # a full collection of the imported modules' objects stops the host for 60 ms

    async def _failed(self, method: str, error: MoerlError) -> None:
        """A host whose other nodes are gone ends, and is placed again with them."""
        if method in ("start", "watch") and await self._lost_a_node():
            log.error("this host ends, since a node of its engine is gone: %s", error)
            os._exit(1)

    async def _lost_a_node(self) -> bool:
        for actor in self._followers:
            try:
                await actor.pid.remote()
            except RayActorError:
                return True
        return False

    async def leave(self) -> str:
        """End the server; returns the node name of the records that this host still serves."""
        await self._host.stop()
        return self._host.node


class FollowerActor(ActorServer):
    """A further node of an engine: starts its part of the server."""

    def __init__(self, context: RunContext, index: int, tp: int, node: int) -> None:
        _begin_engine_process(context, f"engine-{index}-node{node}.host.log")
        super().__init__(context.engine_follower(index, tp))


def _begin_engine_process(context: RunContext, log_file: str) -> None:
    log_to(context.run.logs / log_file)
    os.environ |= engine_environment(context.config)


class ScorerActor(ActorServer):
    """Reward functions in worker processes, outside every event loop."""

    def __init__(self, context: RunContext) -> None:
        log_to(context.run.logs / "scorer.log")
        log.info("the scorer is process %d", os.getpid())
        self._scorers = make_scorers(entries_of(context.config), partial(actor_scorer, context))
        self._tracer = Tracer(context.run.trace, "scorer")
        super().__init__(self._scorers)

    async def score(
        self, task: str, term: str, asked: Sequence[ScoreRequest]
    ) -> tuple[int, list[Score | ScoreError]]:
        """(pid of this process, answers): the pid shows when Ray has restarted the actor."""
        groups = " ".join(dict.fromkeys(request.key.partition(".")[0] for request in asked))
        with self._tracer.span("score", term=term, groups=groups, requests=len(asked)):
            return os.getpid(), list(await self._scorers.score(task, term, asked))


class RemoteScorer:
    """The `Scorers` protocol over an actor handle."""

    def __init__(self, actor: ActorHandle[ScorerActor], *, is_restarted: bool = True) -> None:
        """Ask an actor's scorer.  is_restarted: its death fails its calls, not the run."""
        self._actor, self._is_restarted = actor, is_restarted
        self._pid = 0
        self.restarts = 0

    async def score(
        self, task: str, term: str, asked: Sequence[ScoreRequest]
    ) -> list[Score | ScoreError]:
        with self._score_errors():
            pid, scores = await self._actor.score.remote(task, term, list(asked))
        if self._pid not in (0, pid):
            self.restarts += 1
            log.warning("the scorer died and was restarted as process %d", pid)
        self._pid = pid
        return list(scores)

    async def reply(self, prompt: Prompt, responses: Sequence[str]) -> str:
        with self._score_errors():
            return str(await self._actor.ask.remote("reply", prompt, list(responses)))

    @contextlib.contextmanager
    def _score_errors(self) -> Iterator[None]:
        try:
            with own_errors("the scorer"):
                yield
        except EngineError as error:
            if not self._is_restarted:
                raise
            raise ScorerDown(str(error)) from error


class ControllerActor(ActorServer):
    """The controller, its trainer server, and the only writer of metrics and samples."""

    def __init__(
        self,
        context: RunContext,
        engines: Mapping[int, Engine],
        sizes: Mapping[int, int],
        scorer: ActorHandle[ScorerActor],
        pool_changed: bool = False,
    ) -> None:
        """Take the arguments of the controller; `open` makes it.

        engines, sizes: by number.  pool_changed: engines joined or left since the start.
        """
        super().__init__(None)
        log_to(context.run.logs / "controller.log")
        log.info("the controller is process %d", os.getpid())
        self._run_context, self._sizes, self._pool_changed = context, sizes, pool_changed
        self._engines = engines
        restarts = bool(context.config.supervision.max_restarts)
        self._scorer = RemoteScorer(scorer, is_restarted=restarts)
        self._rows: list[dict[str, Any]] = []
        self._looked_at: StepReport | None = None  # by the alerts
        self._found: dict[str, float] = {}
        self._said: deque[str] = deque()  # by optional writers, in any thread
        self._tracer = Tracer(context.run.trace, "controller", tell=self._said.append)
        self._beside = Beside("the search for alerts", self._said.append)

    async def open(self, endpoint: str = "", lost: Collection[int] = ()) -> str:
        """Bind the trainer server; returns its endpoint.  Must be called once, first.

        endpoint: of a controller that died, whose trainer and engines are running; lost: engines
        that are being restarted.
        """
        context = self._run_context
        mirrors = mirrors_of(context.run, context.config, self._said.append)
        self._metrics = MetricsWriter(context.run.metrics, mirrors)
        self._samples = LineWriter(context.run.samples, self._said.append)
        self._alerts = Alerts(context.config, read_rows(context.run.metrics))
        services = Services(
            model=context.model_shape(),
            engines=self._engines,
            sizes=self._sizes,
            scorer=self._scorer,
            prompts=context.prompts(),
            held_out=context.held_out() if context.config.evaluation.every else None,
            decode=context.decode,
            encode=context.encode,
            blobs=context.blobs(),
            journal=context.journal(),
            stream=context.stream(),
            bad_steps=context.run.bad_steps,
            saved_steps=lambda: (context.run.latest_checkpoint() or (0,))[0],
            on_step=self._on_step,
            on_rewind=self._on_rewind,
            agents=task_agents(context),
        )
        self._plain = self._controller = Controller(
            context.config, services, trainer_alive=bool(endpoint), pool_changed=self._pool_changed
        )
        if endpoint:
            await self._controller.rejoin(lost)
        any_port = f"tcp://{context.config.cluster.address}:*"
        self._server = RpcServer(
            endpoint or context.controller_endpoint() or any_port,
            Keys.read(context.run.endpoints.keys),
            self._handle,
        )
        self._serving = asyncio.get_running_loop().create_task(self._server.serve())
        return self._server.endpoint

    async def poll(self) -> tuple[dict[str, float], list[dict[str, Any]], str, list[str]]:
        """(status, new rows of metrics.jsonl, trainer failure, notices) since the last call."""
        rows, self._rows = self._rows, []
        trainer = self._controller.trainer
        failure, trainer.failure = trainer.failure, ""
        status = self._controller.status()
        open_episodes = (name for name in status if name.startswith("agent/open/"))
        for name in ("async/buffer_depth", "async/in_flight", *open_episodes):
            self._tracer.count(name, status[name])
        return status, rows, failure, self._notices()

    async def finish(self) -> list[str]:
        """Close metrics.jsonl and its mirrors; the last notices."""
        await asyncio.to_thread(self._metrics.close)
        return self._notices()

    def _notices(self) -> list[str]:
        said = [self._said.popleft() for _ in range(len(self._said))]
        return [*self._controller.take_notices(), *said]

    async def _handle(self, message: Message) -> Message:
        with self._tracer.span(type(message).__name__):
            return await self._controller.handle(message)

    def _on_rewind(self, step: int) -> None:
        self._metrics.rewind(step)
        config, metrics = self._run_context.config, self._run_context.run.metrics
        self._alerts = Alerts(config, read_rows(metrics))
        self._samples.rewind(step)
        self._rows = [row for row in self._rows if row["step"] < step]

    def _on_step(self, report: StepReport) -> None:
        if report is not self._looked_at:  # a row that did not fit is written again
            self._looked_at, self._found = report, {}
            self._beside.call(lambda: self._found.update(self._alerts.check(report.metrics)))
        metrics = report.metrics | self._found | {"journal/cut_steps": float(self._metrics.cut)}
        if "scorer/failed" in metrics:  # absent in the row of an evaluation
            metrics["scorer/restarts"] = float(self._scorer.restarts)
        row = self._metrics.write(report.step, report.version, metrics)
        self._samples.write(report.samples)
        self._rows.append(row)
        for name in ("async/lag_mean", "async/lag_max"):
            if name in row:  # absent in the row of an evaluation
                self._tracer.count(name, row[name])


class RayActors:
    """Starts, asks and ends the actors of a run; of the methods only `wait` may wait."""

    _FETCH_S = 1.0  # seconds to fetch an answer that is there; a large one lies on its node

    def __init__(self) -> None:
        self._gpus: EngineGpus | None = None

    def scorer(self, context: RunContext) -> ActorHandle[ScorerActor]:
        restarts = -1 if context.config.supervision.max_restarts else 0
        return place(ScorerActor, context.without_tokenizer(), restarts=restarts)

    def engine(self, context: RunContext, index: int, tp: int) -> PlacedEngine:
        if not is_local(context.config.cluster):
            return place_engine(context, index, tp)
        self._gpus = self._gpus or EngineGpus(context.config)
        return place_engine(context, index, tp, self._gpus.take(index, tp))

    def engine_has_left(self, index: int) -> None:
        """Its place is free for another engine."""
        if self._gpus is not None:
            self._gpus.give_back(index)

    def controller(
        self,
        context: RunContext,
        engines: Mapping[int, Engine],
        sizes: Mapping[int, int],
        scorer: ActorHandle[ScorerActor],
        pool_changed: bool,
    ) -> ActorHandle[ControllerActor]:
        return place(ControllerActor, context, engines, sizes, scorer, pool_changed)

    def kill(self, actor: ActorHandle[Any]) -> None:
        """SIGKILL; its pending calls fail."""
        with contextlib.suppress(RayError):  # its node is gone
            ray.kill(actor)

    def wait(self, refs: Sequence[Any], timeout_s: float) -> list[Any]:
        """Wait until a pending call ends; returns the ended calls.  Without calls, sleep."""
        if not refs:
            time.sleep(timeout_s)
            return []
        ended, _ = ray.wait(list(refs), timeout=timeout_s)
        if ended:
            ended, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        return list(ended)

    def result(self, ref: Any, name: str) -> Any:
        """Answer of a call that has ended.  Raises MoerlError."""
        try:
            with own_errors(name):
                return ray.get(ref, timeout=self._FETCH_S)
        except RayTaskError as error:
            raise EngineError(f"{name}: {type(error.cause).__name__}: {error.cause}") from error
        except GetTimeoutError as error:
            raise CallTimeout(f"{name} did not answer within {self._FETCH_S:g} s") from error


class EngineGpus:
    """GPUs of this machine by engine: as in the printed table, and free GPUs for later engines.

    On a cluster Ray deals the GPUs that each node offers.
    """

    def __init__(self, config: Config) -> None:
        placed = placement(config)
        self._planned = {slot.engine: slot.devices for slot in placed.engines}
        node = placed.engines[0].node
        trainers = () if config.cluster.colocated != "none" else placed.trainers
        others = {
            device
            for slot in (*trainers, *placed.ref_models)
            if slot.node is node
            for device in slot.devices
        }
        self._ours = [device for device in range(node.group.devices) if device not in others]
        self._taken: dict[int, tuple[int, ...]] = {}

    def take(self, engine: int, tp: int) -> tuple[int, ...]:
        """GPUs of an engine, equal at each call; empty on a machine without GPUs.

        Raises ConfigError when an engine outside the table finds too few.
        """
        if engine not in self._taken:
            self._taken[engine] = self._planned.pop(engine, ()) or self._free(tp)
        return self._taken[engine]

    def give_back(self, engine: int) -> None:
        """The engine has left."""
        self._taken.pop(engine, None)

    def _free(self, tp: int) -> tuple[int, ...]:
        if not self._ours:
            return ()
        used = {gpu for gpus in (*self._taken.values(), *self._planned.values()) for gpu in gpus}
        free = [gpu for gpu in self._ours if gpu not in used]
        if len(free) < tp:
            raise ConfigError(
                "tp", tp, f"{len(free)} GPUs of this machine are free: remove an engine first"
            )
        return tuple(free[:tp])
