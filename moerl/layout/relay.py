"""Who sends a version to which engine, when engines that hold it send it on.

The trainer sends to `direct` engines.  From then on every engine that has verified the version may
send it to one other engine per round, rank to equal rank, so the number of holders doubles.  The
trainer's egress is `direct` copies however many engines there are; the price is a depth of
1 + log2(engines / direct) rounds.

A relayed engine plans with the id of the engine that the trainer served (`Hop.plan_engine`): equal
layouts with equal ids give equal regions, so a staging segment is forwarded as it lies, in one
piece, and its digests stay valid.
Rejected: a chain (least egress per engine, but one slow engine delays all behind it) and planning
every hop anew (an engine would have to cut its live weights into boxes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TRAINER = -1


class Hop(NamedTuple):
    """One transfer of a whole version; hops of a round run at the same time."""

    round: int
    src: int  # engine id, or TRAINER
    dst: int  # engine id
    plan_engine: int  # the id that both ends plan with


def relay_schedule(engine_ids: Sequence[int], direct: int) -> tuple[Hop, ...]:
    """Hops that bring a version to every engine once, ordered by round.

    direct: how many engines the trainer serves itself, in round 0; the first ones of engine_ids.
    """
    assert direct >= 1 or not engine_ids, f"direct = {direct}: the trainer serves one at least"
    hops = [Hop(0, TRAINER, engine, engine) for engine in engine_ids[:direct]]
    waiting = list(engine_ids[direct:])
    while waiting:
        number = hops[-1].round + 1
        holders = [(hop.dst, hop.plan_engine) for hop in hops]
        for (src, root), dst in zip(holders, waiting, strict=False):
            hops.append(Hop(number, src, dst, root))
        waiting = waiting[len(holders) :]
    return tuple(hops)


def num_rounds(hops: Sequence[Hop]) -> int:
    """Rounds after the first one: how often a version is passed on."""
    return hops[-1].round if hops else 0
