"""Adoption's pure parts: which standing placement group is which planned one, and who may go on."""

from typing import Any

import pytest

from linckia.api.plan import PlacementGroupPlan
from linckia_trainer.adopt import STILL_SECONDS, Watch, agree, match_places


def planned(key: str, *bundles: dict[str, float], strategy: str = "PACK") -> PlacementGroupPlan:
    return PlacementGroupPlan(key, bundles, strategy, False, (key,))  # type: ignore[arg-type]


def entry(number: int, *bundles: dict[str, float], strategy: str = "PACK", state: str = "CREATED") -> dict[str, Any]:
    """As Ray's table has it."""
    return {
        "placement_group_id": f"id-{number}",
        "name": f"r/pg/{number}",
        "bundles": dict(reversed(list(enumerate(bundles)))),
        "strategy": strategy,
        "state": state,
    }


ONE, TWO = {"CPU": 1.0}, {"CPU": 2.0}


def test_members_say_where_they_stand_and_bundles_tell_the_rest() -> None:
    wanted = [planned("policy", TWO, ONE), planned("rollout-0", ONE), planned("rollout-1", ONE)]
    entries = [entry(0, ONE), entry(1, ONE), entry(2, TWO, ONE)]
    # rollout-1 stands in what rollout-0 would have been given by its bundles alone
    assert match_places(wanted, entries, {"rollout-1": "id-0"}) == {
        "policy": "r/pg/2",
        "rollout-0": "r/pg/1",
        "rollout-1": "r/pg/0",
    }


@pytest.mark.parametrize(
    "there",
    [
        entry(0, TWO),
        entry(0, ONE, TWO),  # the other way round
        entry(0, TWO, ONE, strategy="SPREAD"),
        entry(0, TWO, ONE, state="PENDING"),
    ],
)
def test_what_differs_is_no_place(there: dict[str, Any]) -> None:
    assert match_places([planned("policy", TWO, ONE)], [there], {}) == {}
    assert match_places([planned("policy", TWO, ONE)], [there, entry(1, TWO, ONE)], {}) == {"policy": "r/pg/1"}


def test_one_place_is_given_once_and_a_place_that_is_gone_not_at_all() -> None:
    wanted = [planned("rollout-0", ONE), planned("rollout-1", ONE)]
    assert match_places(wanted, [entry(0, ONE)], {}) == {"rollout-0": "r/pg/0"}
    assert match_places(wanted, [], {"rollout-0": "id-7"}) == {}


def test_ranks_agree_on_one_clean_point_of_the_log() -> None:
    at_3 = {"applied_step": 3, "log_hash": "a", "dirty": False}
    assert agree([at_3, dict(at_3)])
    assert agree([{"stage": "idle"}])  # a group that folds nothing
    assert not agree([at_3, {**at_3, "applied_step": 4}])
    assert not agree([at_3, {**at_3, "log_hash": "b"}])
    assert not agree([{**at_3, "dirty": True}, {**at_3, "dirty": True}])


def test_a_busy_group_is_waited_for_while_it_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linckia_trainer.adopt.time.monotonic", lambda: 0.0)
    watch = Watch(None)  # type: ignore[arg-type]
    watch.see([("update", 1), ("update", 1)], 0.0)
    watch.see([("update", 1), ("update", 2)], STILL_SECONDS)  # one rank is enough
    assert not watch.given_up
    watch.see([("update", 1), ("update", 2)], 2 * STILL_SECONDS)
    assert not watch.given_up
    watch.see([("update", 1), ("update", 2)], 2 * STILL_SECONDS + 1)
    assert watch.given_up
