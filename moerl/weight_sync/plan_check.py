"""One engine without a trainer: would it accept the publishes of a trainer with these settings?

`moerl mismatch` asks it before it samples.  A run asks by a rehearsal (`session`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

from moerl.config.schema import Config
from moerl.core.json_files import read_model_config
from moerl.core.messages import AbortUpdate, Message, PrepareUpdate, SessionMessage
from moerl.core.types import PolicyVersion
from moerl.layout import model_spec
from moerl.weight_sync.buckets import WirePolicy, engine_wants
from moerl.weight_sync.publisher import engine_layout
from moerl.weight_sync.transfer_plan import PLAN_ID, TransferPlan

_START = PolicyVersion(0, 0)  # what a started engine serves


async def check_plan(
    config: Config, engine: int, ask: Callable[[SessionMessage], Awaitable[Message]]
) -> None:
    """Have a started engine compare the transfer plan with its live tensors; nothing is sent.

    ask: sends one message of a session to the engine.  Raises LayoutError or ConfigError
    where no plan exists, EngineError with the engine's sentence when it refuses.
    """
    sync, trainer = config.sync, config.trainer.parallel
    model = read_model_config(Path(config.model.path))
    wants = engine_wants(config.engine.args.get("quantization"), model)
    policy = WirePolicy(config.engine.dtype, wants, sync.bucket_bytes)
    layout = engine_layout(config, config.engine.sizes[engine])
    plan = TransferPlan(model_spec(model), trainer, layout, PLAN_ID, policy)
    prepare = PrepareUpdate(
        engine=engine,
        version=_START,
        plan_engine=PLAN_ID,
        plan=plan.sender(0).plan_id,
        layout="",
        transport=sync.transport,
        trainer=asdict(trainer),
        policy=asdict(policy),
        layer_spec=plan.layer_spec,
        timeout_s=sync.timeout_s,
        folder=sync.folder,
        delta=sync.delta,
    )
    await ask(prepare)
    await ask(AbortUpdate(engine, _START, "it was a rehearsal", sync.timeout_s))
