"""Settings of the shortest runs with agents, and the metric of their exactness."""

from __future__ import annotations

LAG_0 = "mismatch/abs_dlogp_max/lag_0"
SETTINGS = [
    "rollout.groups_per_step=2",
    "rollout.group_size=2",
    "rollout.max_groups_in_flight=2",
    "rollout.buffer_depth=1",
    "checkpoint.every=0",
    "replay.probe=1",
    "observe.engine_alone_s=0",
    "trainer.optimizer.warmup_steps=0",
]
