"""The charts of the report over optimizer steps, by section."""

from __future__ import annotations

from dataclasses import dataclass

from moerl.observe.charts import Chart


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    text: str
    charts: tuple[Chart, ...]


SECTIONS = (
    Section(
        "Learning",
        "Raw reward of the rollouts that each step trained on: thin line per step, thick line a "
        "moving mean. Held-out prompts are never trained on; one version answers all of them. A "
        "group is the answers to one prompt: equal rewards in a group carry no signal.",
        (
            Chart(
                "Reward",
                "reward",
                {"reward/mean": "mean \u00b1 standard deviation"},
                bands={"reward/mean": "reward/std"},
                smooth=True,
            ),
            Chart(
                "Held-out prompts",
                "reward",
                {"eval/reward_mean": "mean \u00b1 standard error"},
                bands={"eval/reward_mean": "eval/reward_se"},
            ),
            Chart("Response length", "tokens", {"sample/length_mean": "mean"}, scale="zero"),
            Chart(
                "Groups without signal, answers cut off",
                "share",
                {
                    "reward/zero_var_frac": "all rewards equal",
                    "sample/truncated_frac": "hit the length limit",
                },
                scale="share",
            ),
            Chart("Gradient norm", "L2, before clipping", {"loss/grad_norm": "norm"}),
        ),
    ),
    Section(
        "Mismatch between trainer and engine",
        "Trainer log-probability against the one that the engine recorded when it sampled the "
        "token, over all tokens of the step, including those of older weights. At lag 0 with both "
        "replays only rounding remains, except in rollouts that an update interrupted. k3 "
        "estimates the KL divergence. The ratio is trainer over engine probability; its mean is 1 "
        "when the records are complete.",
        (
            Chart("k3 divergence", "nats", {"mismatch/k3": "k3"}, scale="log"),
            Chart(
                "Absolute log-probability difference",
                "nats",
                {"mismatch/abs_dlogp_max": "max", "mismatch/abs_dlogp_mean": "mean"},
                scale="log",
            ),
            Chart(
                "Mean importance ratio",
                "ratio",
                {"mismatch/ratio_mean": "mean \u00b1 4 standard errors"},
                bands={"mismatch/ratio_mean": "mismatch/ratio_se"},
                band_scale=4.0,
                level=1.0,
            ),
            Chart(
                "Replay coverage",
                "share of tokens",
                {"routing/replay_cover_frac": "routing", "keep/cover_frac": "sampling mask"},
                scale="share",
            ),
        ),
    ),
    Section(
        "Asynchrony",
        "Engines generate while the trainer works. The lag of a token is the number of versions "
        "between the weights that sampled it and the weights that train on it. A weight update "
        "aborts running requests; they are sent again, with their tokens so far prefilled.",
        (
            Chart(
                "Version lag",
                "versions",
                {"async/lag_max": "max", "async/lag_mean": "mean"},
                scale="zero",
            ),
            Chart(
                "Throughput",
                "tokens/s",
                {
                    "perf/rollout_tokens_per_s": "engine, generated",
                    "perf/train_tokens_per_s": "trainer",
                },
                scale="zero",
            ),
            Chart(
                "Idle",
                "share of time",
                {
                    "async/engine_idle_frac": "engine",
                    "async/trainer_wait_frac": "trainer, waiting for a batch",
                },
                scale="share",
            ),
            Chart(
                "Tokens by lag",
                "share of tokens",
                {
                    "async/lag_frac/lag_0": "0",
                    "async/lag_frac/lag_1": "1",
                    "async/lag_frac/lag_2_3": "2-3",
                    "async/lag_frac/lag_4_7": "4-7",
                    "async/lag_frac/lag_8": "8+",
                },
                scale="share",
            ),
            Chart("Buffer depth", "groups", {"async/buffer_depth": "groups"}, scale="zero"),
            Chart(
                "Buffer age",
                "seconds",
                {"async/buffer_age_max_s": "oldest group taken", "async/buffer_age_mean_s": "mean"},
                scale="zero",
            ),
            Chart(
                "Requests aborted and resumed",
                "requests",
                {"async/interrupts": "requests"},
                scale="zero",
            ),
            Chart(
                "Prefilled again after an update",
                "tokens",
                {"async/recomputed_tokens": "tokens"},
                scale="zero",
            ),
            Chart(
                "Rollouts of several versions",
                "share of rollouts",
                {"async/partial_frac": "share"},
                scale="share",
            ),
            Chart(
                "Weight update and checkpoint",
                "seconds",
                {
                    "async/sync_transfer_s": "transfer",
                    "async/sync_pause_s": "engine pause",
                    "checkpoint/pause_s": "checkpoint pause",
                },
                scale="zero",
            ),
        ),
    ),
)
