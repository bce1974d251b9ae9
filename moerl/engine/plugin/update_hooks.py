"""The receiver inside SGLang: hooks on the path of an update request.

`after_start` opens the receiver of a scheduler process; `around_update` turns an
/update_weights_from_tensor request with load_format "moerl_commit.MODE" into a COMMIT (MODE decides
how running requests meet it: `moerl.engine.plugin.in_flight`).  SGLang passes the request to all
ranks of the engine in the same iteration of their schedulers, between two forward passes, when
weights may change.  Before writing, the ranks exchange whether they hold the verified version; if a
rank does not, no rank writes.

Only a server that moerl started (its scratch folder is private to it) gets a receiver.
Rejected: a custom weight loader of SGLang (it cannot ask the other ranks), writing from our own
thread (a forward pass may be running).
Read at sglang 0.5.23: srt/managers/scheduler_components/weight_updater.py,
srt/model_executor/model_runner_components/weight_updater.py.
"""

from __future__ import annotations

import gc
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moerl.core.errors import EngineError, MoerlError
from moerl.core.json_files import read_json
from moerl.core.messages import Message
from moerl.core.rpc import Keys
from moerl.core.types import PolicyVersion
from moerl.distributed.object_collectives import all_gather_values
from moerl.engine.plugin import adapter_hooks, in_flight, sleep_hooks
from moerl.engine.plugin.loaded_weights import check_modules
from moerl.engine.protocol import ADAPTER
from moerl.engine.weight_layout import engine_layout
from moerl.layout import model_spec
from moerl.weight_sync.held_shards import EngineLayout
from moerl.weight_sync.receiver import Receiver, ReceiverContext, ReceiverSocket
from moerl.weight_sync.receiver_names import (
    COMMIT,
    MEMORY,
    SCRATCH,
    UNCHANGED,
    Committed,
    keys_path,
    socket_path,
)
from moerl.weight_sync.transports.base import Transport
from moerl.weight_sync.transports.factory import make

log = logging.getLogger(__name__)

_BESIDE_ADAPTER = ".base_layer."


_receiver: Receiver | None = None  # receiver of this process; a scheduler process serves one rank


def after_start(_result: None, manager: Any) -> None:
    """AFTER SchedulerWeightUpdaterManager.__post_init__: the model is loaded."""
    from sglang.srt.runtime_context import get_parallel

    scratch = Path(tempfile.gettempdir())
    if not scratch.name.startswith(SCRATCH):
        return
    global _receiver
    rank = int(get_parallel().tp_rank)
    handle: Callable[[Message], Message]
    try:
        _receiver = _open(manager, rank)
        handle = _on_device(_receiver.handle, manager.tp_worker.model_runner)
    except MoerlError as error:
        log.warning("rank %d receives no weights: %s", rank, error)
        handle = _refusing(str(error))
    ReceiverSocket(handle, socket_path(scratch, rank), Keys.read(keys_path(scratch))).start()
    # On a CPU SGLang collects garbage whenever it empties its cache (srt/platforms/cpu.py), so in
    # every commit; freezing skips the objects that exist by now.
    gc.collect()
    gc.freeze()


def around_update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """AROUND SchedulerWeightUpdaterManager.update_weights_from_tensor."""
    name, _, mode = str(request.load_format).partition(".")
    if name not in (COMMIT, MEMORY):
        return original(manager, request)
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    if name == MEMORY:
        what, _, parts = mode.partition(".")
        success, message = sleep_hooks.change(manager, what, parts.split("+"))
        return UpdateWeightsFromTensorReqOutput(success=success, message=message)
    receiver = _receiver
    cause = "no receiver" if receiver is None else receiver.claim(str(request.weight_version))
    if sleep_hooks.is_asleep(manager, "weights"):
        cause = "the weights sleep"
    causes = all_gather_values(cause, str, manager.tp_cpu_group)
    if receiver is None or any(causes):
        if receiver is not None:
            receiver.release()
        return UpdateWeightsFromTensorReqOutput(
            success=False, message=f"{UNCHANGED}: {'; '.join(filter(None, causes))}"
        )
    begun_s, begin, cpu = time.time(), time.perf_counter(), time.thread_time()
    if mode == ADAPTER:
        done, refused = in_flight.Exchanged(True), _fill_slots(manager, receiver, request)
        if refused:
            return UpdateWeightsFromTensorReqOutput(success=False, message=refused)
    else:
        done = in_flight.exchange(manager, mode, request, receiver.commit)
    commit_s, cpu_s = time.perf_counter() - begin, time.thread_time() - cpu
    dist.barrier(group=manager.tp_cpu_group)
    cost = Committed(commit_s, done.recomputed, begun_s, cpu_s)
    message = msgspec.json.encode(cost).decode() + "\n"  # the client reads the first line
    return UpdateWeightsFromTensorReqOutput(success=done.flushed, message=message)


def _fill_slots(manager: Any, receiver: Receiver, request: Any) -> str:
    """An adapter on every rank, or why it is on none."""
    cause, version = "", str(request.weight_version)
    try:
        receiver.commit()
    except EngineError as error:
        cause = str(error)
    causes = all_gather_values(cause, str, manager.tp_cpu_group)
    if not any(causes):
        return ""
    receiver.release()
    adapter_hooks.remove(manager.tp_worker.model_runner, version)
    return f"{UNCHANGED}: {'; '.join(filter(None, causes))}"


def around_request(original: Callable[..., Any], manager: Any, request: Any, *rest: Any) -> Any:
    """AROUND TokenizerControlMixin.update_weights_from_tensor, in the server's own process.

    SGLang delays an update until no request runs; some modes of COMMIT must not wait for that.
    """
    name, _, mode = str(request.load_format).partition(".")
    if name not in (COMMIT, MEMORY) or not mode:
        return original(manager, request, *rest)
    return _at_once(manager, request, "" if name == MEMORY else mode)


async def _at_once(manager: Any, request: Any, mode: str) -> tuple[bool, str]:
    """Run it between steps.  mode: of a commit; "" = memory moves, version stays."""
    manager.auto_create_handle_loop()
    replies = await manager.update_weights_from_tensor_communicator(request)
    success = all(reply.success for reply in replies)
    if success and mode == ADAPTER:
        await adapter_hooks.register(manager, str(request.weight_version))
    elif success and mode:
        manager._update_weight_version_if_provided(request.weight_version)
    return success, " | ".join(str(reply.message) for reply in replies)


def _open(manager: Any, rank: int) -> Receiver:
    """Raises ConfigError or LayoutError when this model's layout is not known exactly."""
    import sglang

    args = manager.scheduler.server_args
    model = SglangModel(manager.tp_worker.model_runner)
    config = read_json(Path(args.model_path) / "config.json")
    layout = engine_layout(args.resolved_dict(), os.environ, config, release=sglang.__version__)
    check_modules(model.module.named_modules())
    return Receiver(
        context=ReceiverContext(
            spec=model_spec(config),
            engine=EngineLayout(tp=layout.tp, ep=layout.ep, dp=layout.dp),
            rank=rank,
            layout=layout.fingerprint(),
        ),
        model=model,
        transports=_transports(args.host),
        held=PolicyVersion.parse(args.weight_version),
    )


def _transports(address: str) -> Callable[[str, str], Transport]:
    return lambda name, folder: make(name, address=address, folder=folder)


def _on_device(handle: Callable[[Message], Message], runner: Any) -> Callable[[Message], Message]:
    """Without it the socket's thread would stage on the first GPU of the process."""
    if runner.device != "cuda":
        return handle

    def there(message: Message) -> Message:
        with torch.cuda.device(runner.gpu_id):
            return handle(message)

    return there


def _refusing(cause: str) -> Callable[[Message], Message]:
    def handle(_message: Message) -> Message:
        raise EngineError(cause)

    return handle


def weights(model: Any) -> dict[str, Any]:
    """The parameters that an update writes: all except scales of the cache, which stay 1.

    A module with adapter slots keeps its weight inside, under its own name.
    """
    return {
        name.replace(_BESIDE_ADAPTER, "."): parameter
        for name, parameter in model.named_parameters()
        if not getattr(parameter, "_skip_weight_check", False)
    }


class SglangModel:
    """`engine_adapters.LiveModel` for a model runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self._runner.model
        return module

    def tensors(self) -> Mapping[str, Tensor]:
        return {name: param.data for name, param in weights(self.module).items()}

    def run_hook(self, name: str) -> None:
        from sglang.srt.model_loader.loader import DefaultModelLoader, post_load_weights

        device = torch.device(self._runner.device)
        if name == "post_load_weights":
            post_load_weights(self.module)
        elif name == "restore_weights_before_loading":
            DefaultModelLoader.restore_weights_before_loading(self.module, device)
        elif name == "postprocess_weights":
            DefaultModelLoader.postprocess_weights(self.module, device)
        else:
            raise EngineError(f"no hook {name!r} is known")

    def slots(self, module: str) -> tuple[Tensor, Tensor]:
        return adapter_hooks.slots(self._runner, module)

    def serve_adapter(
        self, version: str, tensors: dict[str, Tensor], config: dict[str, Any]
    ) -> int:
        return adapter_hooks.fill(self._runner, version, tensors, config)
