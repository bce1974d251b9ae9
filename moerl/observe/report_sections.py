"""The charts of the report over optimizer steps, by section."""

from __future__ import annotations

from dataclasses import dataclass

from moerl.observe.charts import Chart, ChartLine


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    text: str
    charts: tuple[Chart, ...]


SECTIONS = (
    Section(
        "Learning",
        "Raw reward of the rollouts each step trained on: thin line per step, thick line a "
        "moving mean. Held-out prompts are answered by one version; they are never trained on. A "
        "group is the answers to one prompt: with equal rewards it has nothing to learn from.",
        (
            Chart(
                "Reward",
                "reward",
                (
                    ChartLine(
                        "reward/mean", "mean \u00b1 standard deviation", "reward/std", smooth=True
                    ),
                ),
            ),
            Chart(
                "Held-out prompts",
                "reward",
                (ChartLine("eval/reward_mean", "mean \u00b1 standard error", "eval/reward_se"),),
            ),
            Chart(
                "Response length",
                "tokens",
                (ChartLine("sample/length_mean", "mean"),),
                scale="zero",
            ),
            Chart(
                "Groups without signal, answers cut off",
                "share",
                (
                    ChartLine("reward/zero_var_frac", "all rewards equal"),
                    ChartLine("sample/truncated_frac", "hit the length limit"),
                ),
                scale="share",
            ),
            Chart("Gradient norm", "L2, before clipping", (ChartLine("loss/grad_norm", "norm"),)),
        ),
    ),
    Section(
        "Mismatch between trainer and engine",
        "Trainer log-probability against the one the engine recorded when it sampled the token, "
        "over all tokens of the step, old ones too: at lag 0 with both replays only rounding is "
        "left, in rollouts that no update interrupted. k3 estimates the KL divergence; the ratio "
        "is trainer over engine probability, 1 on average when nothing is missing from the "
        "records.",
        (
            Chart("k3 divergence", "nats", (ChartLine("mismatch/k3", "k3"),), scale="log"),
            Chart(
                "Absolute log-probability difference",
                "nats",
                (
                    ChartLine("mismatch/abs_dlogp_max", "max"),
                    ChartLine("mismatch/abs_dlogp_mean", "mean"),
                ),
                scale="log",
            ),
            Chart(
                "Mean importance ratio",
                "ratio",
                (
                    ChartLine(
                        "mismatch/ratio_mean",
                        "mean \u00b1 4 standard errors",
                        "mismatch/ratio_se",
                        4.0,
                    ),
                ),
                level=1.0,
            ),
            Chart(
                "Replay coverage",
                "share of tokens",
                (
                    ChartLine("routing/replay_cover_frac", "routing"),
                    ChartLine("keep/cover_frac", "sampling mask"),
                ),
                scale="share",
            ),
        ),
    ),
    Section(
        "Asynchrony",
        "Engines generate while the trainer works. The lag of a token is the number of versions "
        "between the weights that sampled it and those it trains. A weight update aborts running "
        "requests; they are sent again, and what they had is prefilled again.",
        (
            Chart(
                "Version lag",
                "versions",
                (ChartLine("async/lag_max", "max"), ChartLine("async/lag_mean", "mean")),
                scale="zero",
            ),
            Chart(
                "Throughput",
                "tokens/s",
                (
                    ChartLine("perf/rollout_tokens_per_s", "engine, generated"),
                    ChartLine("perf/train_tokens_per_s", "trainer"),
                ),
                scale="zero",
            ),
            Chart(
                "Idle",
                "share of time",
                (
                    ChartLine("async/engine_idle_frac", "engine"),
                    ChartLine("async/trainer_wait_frac", "trainer, waiting for a batch"),
                ),
                scale="share",
            ),
            Chart(
                "Tokens by lag",
                "share of tokens",
                (
                    ChartLine("async/lag_frac/lag_0", "0"),
                    ChartLine("async/lag_frac/lag_1", "1"),
                    ChartLine("async/lag_frac/lag_2_3", "2-3"),
                    ChartLine("async/lag_frac/lag_4_7", "4-7"),
                    ChartLine("async/lag_frac/lag_8", "8+"),
                ),
                scale="share",
            ),
            Chart(
                "Buffer depth", "groups", (ChartLine("async/buffer_depth", "groups"),), scale="zero"
            ),
            Chart(
                "Buffer age",
                "seconds",
                (
                    ChartLine("async/buffer_age_max_s", "oldest group taken"),
                    ChartLine("async/buffer_age_mean_s", "mean"),
                ),
                scale="zero",
            ),
            Chart(
                "Requests aborted and resumed",
                "requests",
                (ChartLine("async/interrupts", "requests"),),
                scale="zero",
            ),
            Chart(
                "Prefilled again after an update",
                "tokens",
                (ChartLine("async/recomputed_tokens", "tokens"),),
                scale="zero",
            ),
            Chart(
                "Rollouts of several versions",
                "share of rollouts",
                (ChartLine("async/partial_frac", "share"),),
                scale="share",
            ),
            Chart(
                "Weight update and checkpoint",
                "seconds",
                (
                    ChartLine("async/sync_transfer_s", "transfer"),
                    ChartLine("async/sync_pause_s", "engine pause"),
                    ChartLine("checkpoint/pause_s", "checkpoint pause"),
                ),
                scale="zero",
            ),
        ),
    ),
)
