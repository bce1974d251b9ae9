"""Which episodes of an oversampled group are trained.

Plain Python without torch: the controller's process decides it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence


def resample_correct(
    rewards: Sequence[float], errors: Sequence[float], keep: int, rng: random.Random
) -> list[int]:
    """GRPO-RoC, resampling on correct (arXiv 2508.20722 section 3.2): indices to keep, ascending.

    rewards: of all episodes of one prompt, correct when above 0.  errors: of each
    episode, such as the share of failed tool calls plus a format penalty, >= 0.  Both kinds are cut
    in the same proportion, keep / len: incorrect answers uniformly, so that failures stay diverse;
    correct answers without replacement with probability falling in their errors, 1 / (errors + c)
    with c the mean error, so that clean successes are preferred and none is excluded.
    Example: 4 correct and 4 incorrect episodes with keep = 4 leave 2 and 2.
    """
    assert len(rewards) == len(errors), f"{len(rewards)} rewards, {len(errors)} error counts"
    assert 0 < keep <= len(rewards), f"keep {keep} of {len(rewards)} episodes"
    correct = [i for i, reward in enumerate(rewards) if reward > 0.0]
    wrong = [i for i, reward in enumerate(rewards) if reward <= 0.0]
    share = keep * len(correct) / len(rewards)
    num_correct = min(int(share + 0.5), len(correct))
    num_correct = max(num_correct, keep - len(wrong))
    chosen = rng.sample(wrong, keep - num_correct)
    floor = sum(errors[i] for i in correct) / max(len(correct), 1) or 1.0
    pool = {i: 1.0 / (errors[i] + floor) for i in correct}
    for _ in range(num_correct):
        pick = rng.choices(list(pool), weights=list(pool.values()))[0]
        chosen.append(pick)
        del pool[pick]
    return sorted(chosen)
