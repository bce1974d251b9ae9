"""What the report draws over optimizer steps: sections of charts, as data."""

from __future__ import annotations

from dataclasses import dataclass

from moerl.observe.charts import Chart, Line


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
                (Line("reward/mean", "mean \u00b1 standard deviation", "reward/std", smooth=True),),
            ),
            Chart(
                "Held-out prompts",
                "reward",
                (Line("eval/reward_mean", "mean \u00b1 standard error", "eval/reward_se"),),
            ),
            Chart("Response length", "tokens", (Line("sample/length_mean", "mean"),), zero=True),
            Chart(
                "Groups without signal, answers cut off",
                "share",
                (
                    Line("reward/zero_var_frac", "all rewards equal"),
                    Line("sample/truncated_frac", "hit the length limit"),
                ),
                share=True,
            ),
            Chart("Gradient norm", "L2, before clipping", (Line("loss/grad_norm", "norm"),)),
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
            Chart("k3 divergence", "nats", (Line("mismatch/k3", "k3"),), log=True),
            Chart(
                "Absolute log-probability difference",
                "nats",
                (
                    Line("mismatch/abs_dlogp_max", "max"),
                    Line("mismatch/abs_dlogp_mean", "mean"),
                ),
                log=True,
            ),
            Chart(
                "Mean importance ratio",
                "ratio",
                (
                    Line(
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
                    Line("routing/replay_cover_frac", "routing"),
                    Line("keep/cover_frac", "sampling mask"),
                ),
                share=True,
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
                (Line("async/lag_max", "max"), Line("async/lag_mean", "mean")),
                zero=True,
            ),
            Chart(
                "Throughput",
                "tokens/s",
                (
                    Line("perf/rollout_tokens_per_s", "engine, generated"),
                    Line("perf/train_tokens_per_s", "trainer"),
                ),
                zero=True,
            ),
            Chart(
                "Idle",
                "share of time",
                (
                    Line("async/engine_idle_frac", "engine"),
                    Line("async/trainer_wait_frac", "trainer, waiting for a batch"),
                ),
                share=True,
            ),
            Chart(
                "Tokens by lag",
                "share of tokens",
                (
                    Line("async/lag_frac/lag_0", "0"),
                    Line("async/lag_frac/lag_1", "1"),
                    Line("async/lag_frac/lag_2_3", "2-3"),
                    Line("async/lag_frac/lag_4_7", "4-7"),
                    Line("async/lag_frac/lag_8", "8+"),
                ),
                share=True,
            ),
            Chart("Buffer depth", "groups", (Line("async/buffer_depth", "groups"),), zero=True),
            Chart(
                "Buffer age",
                "seconds",
                (
                    Line("async/buffer_age_max_s", "oldest group taken"),
                    Line("async/buffer_age_mean_s", "mean"),
                ),
                zero=True,
            ),
            Chart(
                "Requests aborted and resumed",
                "requests",
                (Line("async/interrupts", "requests"),),
                zero=True,
            ),
            Chart(
                "Prefilled again after an update",
                "tokens",
                (Line("async/recomputed_tokens", "tokens"),),
                zero=True,
            ),
            Chart(
                "Rollouts of several versions",
                "share of rollouts",
                (Line("async/partial_frac", "share"),),
                share=True,
            ),
            Chart(
                "Weight update and checkpoint",
                "seconds",
                (
                    Line("async/sync_transfer_s", "transfer"),
                    Line("async/sync_pause_s", "engine pause"),
                    Line("checkpoint/pause_s", "checkpoint pause"),
                ),
                zero=True,
            ),
        ),
    ),
)
