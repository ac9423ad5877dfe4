"""Weight updates and engines that are lost, as the driver handles them."""

from __future__ import annotations

from typing import Any

import pytest
from driver_parts import Driver

from slime.cluster.engine import EnginesLost
from slime.cluster.trainer import OldActor
from slime.engines.sglang_api import EngineError
from slime.weights.update import UpdateReport, WeightSyncError

A, B, C, NEW = (f"http://127.0.0.1:{port}" for port in (1, 2, 3, 4))


def tolerant(serving: list[str], **more: Any) -> Driver:
    return Driver(serving=serving, use_fault_tolerance=True, **more)


def torn(*failed: str) -> WeightSyncError:
    return WeightSyncError("0.1", {url: EngineError("reset") for url in failed}, ["b"], [])


# --- an update ---------------------------------------------------------------------------------


def test_apart_nobody_sleeps() -> None:
    driver = Driver()
    driver.pool.update_weights()
    assert driver.said == ["begin_update", "actor sends 0.0", "end_update"]


def test_optimizer_and_gradients_make_room_before_engines_take_weights() -> None:
    driver = Driver(colocated=True, critic=True, audit_weights=True)
    driver.pool.update_weights()
    assert driver.said == [
        "begin_update",
        "critic sleeps",
        "actor wakes",
        "actor sleeps but for its weights",
        "onload weights",
        "actor sends 0.0",
        "actor sleeps",
        "critic sleeps",
        "onload kv_cache, cuda_graph",
        "actor audits",
        "end_update",
    ]
    assert driver.log.pending["perf/audit_logprob_diff"] == 0.25
    assert driver.log.pending["perf/update_weights_wire_bytes"] == 7.0
    assert (
        driver.log.pending["memory/sleep/gib"]
        == driver.log.pending["memory/sleep/critic_gib"]
        == 1.0
    )


@pytest.mark.parametrize(
    ("trained", "first_rollout", "version"),
    [(None, 0, "0.0"), (None, 5, "0.5"), (4, 5, "0.5"), (4, 3, "0.5")],
)
def test_a_version_says_how_many_steps_had_trained_the_weights(
    trained: int | None, first_rollout: int, version: str
) -> None:
    driver = Driver(trained=trained, first_rollout=first_rollout, num_rollout=9)
    driver.pool.update_weights()
    assert (driver.pool.clock.version, driver.pool.clock.step) == (version, int(version[2:]))
    driver.trainer.train(6, [])
    driver.pool.update_weights()
    assert (driver.pool.clock.version, driver.pool.clock.step) == ("0.7", 7)


def test_a_run_resumed_between_two_updates_sends_what_the_engines_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(trained=4, first_rollout=5, num_rollout=9)
    driver.trainer.old_actor = OldActor(True, 1, 3, {"held": 3, "lag": 1, "ahead": 1}, 5)
    models: list[str] = []
    send = driver.actor.update_weights

    def watch(
        urls: list[str], version: str, same_host: bool, slots: object, model: str, **more: bool
    ) -> UpdateReport:
        models.append(f"{version} {model}")
        return send(urls, version, **more)

    monkeypatch.setattr(driver.actor, "update_weights", watch)
    driver.pool.update_weights()
    assert driver.pool.clock.step == 3
    driver.actor_manager.unsynced = ["http://127.0.0.1:2"]
    driver.pool.sync_recovered_engines()  # an engine that was lost gets the same
    driver.actor_manager.unsynced = []
    driver.trainer.train(5, [])
    driver.pool.update_weights()
    assert models == ["0.3 rollout_actor", "0.3 rollout_actor", "0.6 actor"]
    assert "actor copies rollout_actor to old_actor" in driver.said
    assert driver.said.count("actor copies actor to rollout_actor") == 1


def test_an_engine_that_comes_back_between_two_updates_gets_the_version_of_the_others() -> None:
    """Of which ``--keep-old-actor`` has a copy. What is generated has one version, that of the
    copy.
    """
    driver = Driver(keep_old_actor=True)
    driver.pool.update_weights()
    driver.trainer.train(0, [])
    driver.said.clear()
    driver.actor_manager.unsynced = ["http://127.0.0.1:2"]
    driver.pool.sync_recovered_engines()
    assert driver.actor.sent[-1] == ["http://127.0.0.1:2"] and "actor sends 0.0" in driver.said
    assert driver.pool.clock.step == 0 and not any("copies" in said for said in driver.said)
    driver.actor_manager.unsynced = []
    driver.pool.update_weights()
    assert "actor sends 0.1" in driver.said and driver.pool.clock.step == 1


def test_a_run_without_engines_updates_nothing() -> None:
    driver = Driver(serving=[])
    driver.pool.update_weights()
    driver.pool.offload()
    driver.pool.end_for_save()
    assert driver.said == []


@pytest.mark.parametrize(
    ("check", "interval", "checked"),
    [(True, 3, [0, 3, 6]), (True, 1, [0, 1, 2, 3, 4, 5, 6]), (True, 0, [0]), (False, 3, [])],
)
def test_every_so_many_updates_are_checked_like_the_first(
    check: bool, interval: int, checked: list[int]
) -> None:
    driver = Driver(check_weight_update_equal=check, check_weight_update_interval=interval)
    found = []
    for update in range(7):
        driver.said.clear()
        driver.pool.update_weights()
        if "actor sends 0.0 again" in driver.said:
            found.append(update)
    assert found == checked


# --- engines that are lost during an update ------------------------------------------------------


def test_an_update_is_repeated_for_all_that_are_left_the_torn_included() -> None:
    driver = tolerant([A, B, C])
    driver.actor.fails = [torn(A), torn(C)]
    driver.pool.update_weights()
    assert driver.actor.sent == [[A, B, C], [B, C], [B]]
    assert driver.actor_manager.arguments["lose_engines"] == [({A: "reset"},), ({C: "reset"},)]
    assert driver.actor_manager.arguments["end_update"] == [([B],)] and driver.pool.urls == [B]
    assert f"lost {A} during a weight update; going on with {B}, {C}" in driver.printed.getvalue()


def test_an_error_through_ray_is_understood() -> None:
    class FromRay(WeightSyncError):
        def __init__(self, cause: WeightSyncError) -> None:
            self.cause = cause

    driver = tolerant([A, B])
    driver.actor.fails = [FromRay(torn(A))]
    driver.pool.update_weights()
    assert driver.actor.sent == [[A, B], [B]]


def test_when_nobody_is_named_those_that_do_not_answer_are_left_out() -> None:
    driver = tolerant([A, B])
    driver.actor_manager.found_dead = [B]
    driver.actor.fails = [EngineError("b did not score the probe")]
    driver.pool.update_weights()
    assert driver.actor.sent == [[A, B], [A]]


def test_when_nobody_is_to_blame_the_error_propagates() -> None:
    driver = tolerant([A])
    driver.actor.fails = [EngineError("too long")]
    with pytest.raises(EngineError, match="too long"):
        driver.pool.update_weights()


def test_without_fault_tolerance_the_error_propagates() -> None:
    driver = Driver(serving=[A, B])
    driver.actor.fails = [torn(A)]
    with pytest.raises(WeightSyncError, match=f"engine {A}: EngineError: reset"):
        driver.pool.update_weights()
    assert driver.actor_manager.arguments["lose_engines"] == [(None,)], (
        "nobody is blamed without a proof"
    )


def test_without_fault_tolerance_an_engine_that_ended_is_what_ends_the_run() -> None:
    """The update finds it where its last request was answered before; the manager knows what became
    of its process.
    """
    driver = Driver(serving=[A, B])
    driver.actor.fails = [torn(A)]
    driver.actor_manager.fatal_when_lost = "engine 0 was lost: its process 7 ended"
    driver.actor_manager.found_dead = [A]
    with pytest.raises(EnginesLost, match="process 7"):
        driver.pool.update_weights()


def test_other_errors_are_not_the_engines() -> None:
    driver = tolerant([A])
    driver.actor.fails = [ZeroDivisionError()]
    with pytest.raises(ZeroDivisionError):
        driver.pool.update_weights()
    assert "lose_engines" not in driver.said


@pytest.mark.parametrize("colocated", [False, True])
def test_the_last_engine_is_replaced_in_the_memory_that_it_needs(colocated: bool) -> None:
    driver = tolerant([A], colocated=colocated)
    driver.actor_manager.replacements = [NEW]
    driver.actor.fails = [torn(A)]
    driver.pool.update_weights()
    between = driver.said[driver.said.index("lose_engines") + 1 : -1]
    room = ["actor wakes", "actor sleeps but for its weights", "onload weights"]
    after = ["actor sleeps", "onload kv_cache, cuda_graph"]
    expected = ["actor sleeps", "start_lost_engines", "offload", *room, "actor sends 0.0", *after]
    assert between == (expected if colocated else ["start_lost_engines", "actor sends 0.0"])
    assert driver.actor.sent == [[A], [NEW]]


def test_engines_that_are_started_before_an_update_get_room_once() -> None:
    """SGLang's scheduler ends at a second resume."""
    driver = tolerant([A], colocated=True)
    driver.actor_manager.serving, driver.actor_manager.replacements = [], [NEW]
    driver.pool.update_weights()
    assert driver.said[:4] == ["begin_update", "actor sleeps", "start_lost_engines", "offload"]
    assert driver.said.count("onload weights") == 1 and driver.actor.sent == [[NEW]]


@pytest.mark.parametrize(
    ("tolerates", "words"),
    [(False, "no engine is left"), (True, "no engine could be started again")],
)
def test_where_none_can_be_started_the_run_ends(tolerates: bool, words: str) -> None:
    driver = Driver(serving=[A], use_fault_tolerance=tolerates)
    driver.actor_manager.serving = []
    with pytest.raises(EnginesLost, match=words):
        driver.pool.update_weights()


def test_an_engine_lost_after_its_update_is_replaced_by_another_update() -> None:
    driver = tolerant([A], colocated=True, audit_weights=True)
    answers = [EngineError("gone"), 0.5]

    def check_probe(urls: list[str]) -> float:
        answer = answers.pop(0)
        if isinstance(answer, float):
            return answer
        driver.actor_manager.found_dead, driver.actor_manager.replacements = [A], [NEW]
        raise answer

    driver.actor.check_probe = check_probe  # type: ignore[method-assign]
    driver.pool.update_weights()
    assert driver.actor.sent == [[A], [NEW]] and driver.actor_manager.arguments["end_update"] == [
        ([NEW],)
    ]
    assert driver.log.pending["perf/audit_logprob_diff"] == 0.5


def test_a_fatal_loss_ends_the_run_with_its_reason() -> None:
    driver = tolerant([A])
    driver.actor_manager.fatal = "no engine is left; the last one: engine 0"
    for call in (driver.pool.update_weights, driver.pool.sync_recovered_engines):
        with pytest.raises(EnginesLost, match="engine 0"):
            call()


# --- engines that come back while others generate ------------------------------------------------


def recovered(driver: Driver, keep_version: bool = False) -> list[str]:
    """What is done about engines that were started again, in one call."""
    driver.said.clear()
    driver.pool.next_poll = 0.0
    driver.pool.sync_recovered_engines(keep_version)
    return list(driver.said)


def test_it_gets_the_weights_that_the_others_hold_and_is_audited() -> None:
    driver = tolerant([A], audit_weights=True)
    driver.actor_manager.unsynced = [NEW]
    asked = ["status", "begin_update", "actor sends ", "actor audits", "end_update"]
    assert recovered(driver) == asked and driver.actor.sent == [[NEW]] == driver.actor.probed
    assert f"started again, with the current weights: {NEW}" in driver.printed.getvalue()


def test_where_a_step_was_trained_since_all_engines_get_newer_weights() -> None:
    driver = tolerant([A])
    driver.pool.update_weights()
    driver.trainer.train(0, [])
    driver.actor_manager.unsynced = [NEW]
    recovered(driver)
    assert driver.actor.sent == [[A], [A, NEW]] and driver.pool.clock.version == "0.1"


def test_no_evaluation_gets_newer_weights_while_an_engine_serves() -> None:
    driver = tolerant([A])
    driver.trainer.trained, driver.actor_manager.unsynced = 3, [NEW]
    assert recovered(driver, keep_version=True) == ["status"]
    driver.actor_manager.serving = []
    assert "actor sends 0.4" in recovered(driver, keep_version=True), "or nobody would answer"


def test_colocated_a_new_engine_waits_for_the_next_update_and_nobody_says_otherwise() -> None:
    driver = tolerant([A], colocated=True)
    driver.actor_manager.unsynced = [NEW]
    assert recovered(driver) == ["status"] and not driver.printed.getvalue()
    driver.actor_manager.serving = []
    said = recovered(driver)
    assert said[:3] == ["status", "offload", "actor wakes"] and "actor sends 0.0" in said


def test_when_all_were_lost_the_next_that_comes_is_looked_after() -> None:
    driver = tolerant([A])
    driver.actor_manager.serving = []
    driver.pool.end_update([])
    assert driver.pool.urls == [A], "they are being replaced"
    driver.actor_manager.unsynced = [NEW]
    recovered(driver)
    assert driver.actor.sent == [[NEW]]


def test_the_manager_is_not_asked_at_every_turn_of_a_wait() -> None:
    driver = tolerant([A])
    driver.pool.next_poll = float("inf")
    driver.pool.sync_recovered_engines()
    assert driver.said == []
    recovered(Driver(serving=[]))


def test_a_wait_inside_an_update_does_not_begin_another() -> None:
    driver = tolerant([A])
    driver.actor_manager.unsynced = [NEW]
    inside: list[list[str]] = []
    begin = driver.actor_manager.results["begin_update"]

    def begin_update() -> Any:
        before = len(driver.said)
        driver.pool.next_poll = 0.0
        driver.pool.sync_recovered_engines()
        inside.append(driver.said[before:])
        return begin()

    driver.actor_manager.results["begin_update"] = begin_update
    recovered(driver)
    assert inside == [[]]
