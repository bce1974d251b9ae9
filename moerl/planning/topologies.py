"""Forecast of a step on the GPUs of a cluster: engines and trainer divided, in turns, or both.

Steps are simulated, since tails make closed forms too low by up to half.  Service times come from
bytes and operations at assumed rates; measured ones are in the place of these in a run's metrics.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from moerl.config import Config
from moerl.config.clusters import EngineSlot, TrainerSlot, is_local, moved_parts, placement
from moerl.core.errors import MoerlError
from moerl.layout.shards import hf_shapes
from moerl.planning.memory import engine_memory, trainer_memory, training_of
from moerl.planning.publish_forecast import BUS_GB_S, GB, MEMORY_GB_S, Layouts
from moerl.planning.step_simulation import Costs, SimulatedRun, Topology, Workload, simulate

_FLOP_S = 400e12  # of a GPU, in training and prefill: 40 % of an H100
_PAUSE_S, _SWITCH_S = 0.5, 2.0  # of a commit; of a switch in one direction, beside copies
_MEAN, _SIGMA = 0.25, 0.8  # lengths are lognormal; the mean is a share of the longest
_PROMPT = 512  # tokens, where the recipe has no limit
_DRAWN, _STEADY = 4096, 6


def describe(config: Config, layouts: Layouts, received: float) -> str:
    """A table; empty without GPUs that the recipe fits.  received: bytes of an engine rank."""
    try:
        placed, tp = placement(config), layouts[2].tp
    except MoerlError:  # the forecast of a publish says it
        return ""
    slots: list[EngineSlot | TrainerSlot] = [*placed.engines, *placed.trainers]
    gpus = len({(slot.node.name, gpu) for slot in slots for gpu in slot.devices})
    if not gpus:
        return ""
    depth, found = config.rollout.buffer_depth, dict[str, SimulatedRun]()
    for name, topology, trainers in _topologies(config, gpus, tp):
        workload, costs = _service(config, layouts, received, trainers, turns=topology.shared > 0)
        found[name] = simulate(workload, costs, topology, 2 * (depth + 1) + _STEADY)
    rows = [
        f"{name:<28}{one.step_s:>10.1f}{one.trainer_idle:>12.0%}{one.recomputed:>12.0%}"
        for name, one in sorted(found.items(), key=lambda item: item[1].step_s)
    ]
    prompt, longest = _prompt(config), config.sampling.max_new_tokens
    return "\n".join(
        [
            f"{f'steps of {gpus} GPUs':<28}{'seconds':>10}{'idle':>12}{'again':>12}",
            *rows,
            f"simulated at rollout.buffer_depth {depth}; idle: share of the trainer's time; again: "
            "sampled tokens that are prefilled again, as a share",
            f"assumed: answers of {_MEAN * longest:,.0f} tokens (lognormal, sigma {_SIGMA}, at "
            f"most {longest:,}), prompts of {prompt:,}; {_FLOP_S / 1e12:g} TFLOP/s and "
            f"{MEMORY_GB_S:,.0f} GB/s of a GPU; {_SWITCH_S:g} s a switch, copies at "
            f"{BUS_GB_S:g} GB/s; rewards at once; memory is not checked",
        ]
    )


def _prompt(config: Config) -> int:
    return config.task.max_prompt_tokens or _PROMPT


def _topologies(config: Config, gpus: int, tp: int) -> Iterator[tuple[str, Topology, int]]:
    """Name, topology, and GPUs of the trainer.  Shares of a quarter, a half, three, and its own.

    Engines and trainer take turns on one machine only, as `check_cluster` says.
    """
    parallel, rollout, most = config.trainer.parallel, config.rollout, gpus // tp
    depth, flying = rollout.buffer_depth, rollout.max_groups_in_flight
    own = config.engine.count if config.cluster.colocated == "none" else 0
    model = parallel.tp * parallel.pp * parallel.cp
    in_turns = is_local(config.cluster)
    if in_turns:
        yield "turns", Topology(0, depth, most, flying), gpus
    for engines in sorted({own, most // 4, most // 2, 3 * most // 4}):
        trainers = gpus - engines * tp
        if engines and trainers > 0 and trainers % model == 0:
            name = f"{engines * tp} + {trainers}"
            mark = " (this recipe)" if engines == own else ""
            yield f"divided {name}{mark}", Topology(engines, depth, 0, flying), trainers
            if in_turns:
                shared = Topology(engines, depth, most - engines, flying)
                yield f"hybrid, {engines * tp} awake", shared, trainers


def _service(
    config: Config, layouts: Layouts, received: float, trainers: int, *, turns: bool
) -> tuple[Workload, Costs]:
    spec, parallel, engine, _ = layouts
    kept = spec.experts_per_token / max(1, spec.experts)
    active = sum(
        math.prod(shape) * (kept if ".experts." in name else 1.0)
        for name, shape in hf_shapes(spec).items()
    )
    longest, rollout = config.sampling.max_new_tokens, config.rollout
    mean, prompt = _MEAN * longest, _prompt(config)
    draw, middle = random.Random(0), math.log(mean) - _SIGMA**2 / 2
    drawn = (round(draw.lognormvariate(middle, _SIGMA)) for _ in range(_DRAWN))
    lengths = [max(1, min(longest, length)) for length in drawn]
    workload = Workload(rollout.groups_per_step, rollout.group_size, lengths, (0.0,), prompt)
    kv_token = engine_memory(spec, engine, received, 0, config.engine.dtype).kv_token
    token_s = 2 * active / _FLOP_S / engine.tp
    tokens = rollout.groups_per_step * rollout.group_size * (prompt + sum(lengths) / _DRAWN)
    ranks = trainer_memory(spec, parallel, training_of(config, gpu=True))
    copied = {"optimizer": "optimizer", "trainer_weights": "weights"}
    parked = [name for part, name in copied.items() if turns and part in moved_parts(config)]
    copies = sum(max(getattr(rank, name) for rank in ranks) for name in parked)
    switch_s = _SWITCH_S + copies / GB / BUS_GB_S
    return workload, Costs(
        train_s=[8 * active * tokens / _FLOP_S / trainers],  # 6, and 2 to recompute
        token_s=received / GB / MEMORY_GB_S,
        request_token_s=token_s + kv_token * (prompt + mean / 2) / GB / MEMORY_GB_S,
        prefill_token_s=token_s,
        transfer_s=received / GB / BUS_GB_S,
        pause_s=_PAUSE_S,
        keeps_cache=config.rollout.in_flight_mode == "in_place" and not turns,
        close_s=switch_s,
        open_s=switch_s,
    )
