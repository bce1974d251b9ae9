"""Every way to produce episodes admits the groups that were stored: `tests.helpers.episode_oracle`.

A refactoring changes none of the digests.  They are written anew with
`python -m tests.helpers.episode_oracle --write`, and only where a change of what is trained is
meant.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.episode_oracle import differences, digest, main, stored
from tests.helpers.oracle_runs import SCENARIOS, Played, played


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_groups_are_those_that_were_stored(name: str, tmp_path: Path) -> None:
    found = differences(played(name, tmp_path).summary, stored()[name])
    assert not found, "\n".join(found)


def test_each_stored_scenario_is_played() -> None:
    assert stored().keys() == SCENARIOS.keys()


@pytest.mark.parametrize("name", ["quorum_carry", "mixture"])
def test_a_run_repeats_itself(name: str, tmp_path: Path) -> None:
    first, second = (played(name, tmp_path / one).summary for one in "ab")
    assert first == second


# --- controls -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return played("text_masks", tmp_path_factory.mktemp("text"))


def _row(group: Any) -> Any:
    return group["episodes"][0]["turns"][0]["rollout"]


def swap_siblings(group: Any) -> None:
    one, other, *_ = group["episodes"]
    one["turns"], other["turns"] = other["turns"], one["turns"]


def change_token(group: Any) -> None:
    _row(group)["token_ids"][1][-1] += 1


def change_version(group: Any) -> None:
    _row(group)["versions"][0]["version"] = "0.9"


def move_span(group: Any) -> None:
    _row(group)["versions"][-1]["first"] += 1


def change_logprobs(group: Any) -> None:
    _row(group)["sealed_logprobs"][0]["values"][-1] = digest("other bytes")


def change_reward(group: Any) -> None:
    group["episodes"][0]["score"]["reward"] += 0.25


def lose_peer(group: Any) -> None:
    group["peers"] = [0.5]


@pytest.mark.parametrize(
    "damage",
    [
        swap_siblings,
        change_token,
        change_version,
        move_span,
        change_logprobs,
        change_reward,
        lose_peer,
    ],
)
def test_what_is_trained_cannot_change_unseen(text: Played, damage: Callable[[Any], None]) -> None:
    forms = [one for forms in text.groups.values() for one in forms]
    for whole in forms:
        other = copy.deepcopy(whole)
        assert digest(other) == digest(whole)
        damage(other)
        assert digest(other) != digest(whole)


def test_every_group_has_its_own_tokens(text: Played) -> None:
    """Else groups that are mixed up would be equal."""
    digests = [one for found in text.summary["groups"].values() for one in found]
    assert len(set(digests)) == len(digests)


def test_other_tokens_are_seen(text: Played, tmp_path: Path) -> None:
    assert played("text_masks", tmp_path, seed=1).summary["digest"] != text.summary["digest"]


def test_ci_does_not_store_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    before = stored()
    assert main(["--write"]) == 2
    assert stored() == before
