"""What the driver does when engines are lost during a weight update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slime.cluster.engine_fleet import EnginesLost
from slime.cluster.faults import Faults
from slime.engines.handle import EngineError
from slime.weights.fleet import WeightSyncError


class Manager:
    """The rollout manager's part: who is there, by URL."""

    def __init__(self, serving: list[str], unsynced: list[str] = []) -> None:  # noqa: B006 - only read
        self.serving, self.unsynced, self.fatal = list(serving), list(unsynced), None
        self.found_dead: list[str] = []
        self.blamed: list[dict[str, str]] = []
        self.replacements: list[str] = []
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self.calls.append(name)
            type(self).__dict__.get(f"_{name}", lambda *a: None)(self, *arguments)
            return {"fatal": self.fatal, "serving": self.serving, "unsynced": self.unsynced, "slots": {}}

        return SimpleNamespace(remote=remote)

    def _lose_engines(self, blamed: dict[str, str]) -> None:
        self.blamed.append(blamed)
        gone = [*blamed, *self.found_dead]
        self.serving = [url for url in self.serving if url not in gone]

    def _start_lost_engines(self) -> None:
        self.unsynced = self.replacements


class Group:
    def __init__(self, said: list[str]) -> None:
        self.sleep, self.wake = lambda: said.append("sleep"), lambda: said.append("wake")


def faults_of(manager: Manager, tolerant: bool = True, colocated: bool = False) -> Any:
    run: Any = SimpleNamespace(
        args=SimpleNamespace(
            use_fault_tolerance=tolerant, offload_train=colocated, offload_rollout=colocated,
            rollout_health_check_timeout=1.0,
        ),
        manager=manager, manager_call=lambda refs, what, deadline=None: refs[0], engine_urls=[],
        display=SimpleNamespace(note=lambda text: None), groups=[Group(manager.calls)] if colocated else [],
    )  # fmt: skip
    run.make_room_for_weights = lambda: manager.calls.append("make room") if colocated else None
    return Faults(run)


def failing(*failures: BaseException) -> Any:
    """Raises these one after the other, then returns what it was called with; ``calls`` has all of that."""
    left = list(failures)

    def call(urls: list[str]) -> list[str]:
        call.calls.append(list(urls))  # type: ignore[attr-defined]
        if left:
            raise left.pop(0)
        return urls

    call.calls = []  # type: ignore[attr-defined]
    return call


def torn(*failed: str) -> WeightSyncError:
    return WeightSyncError("0.1", {url: EngineError("reset") for url in failed}, ["b"], [])


def test_an_update_is_repeated_for_all_that_are_left_the_torn_included() -> None:
    manager = Manager(["a", "b", "c"])
    call = failing(torn("a"), torn("c"))
    assert faults_of(manager).survive(call, ["a", "b", "c"]) == (["b"], ["b"])
    assert call.calls == [["a", "b", "c"], ["b", "c"], ["b"]]
    assert manager.blamed == [{"a": "reset"}, {"c": "reset"}]


def test_an_error_through_ray_is_understood() -> None:
    class FromRay(WeightSyncError):
        def __init__(self, cause: WeightSyncError) -> None:
            self.cause = cause

    manager = Manager(["a", "b"])
    assert faults_of(manager).survive(failing(FromRay(torn("a"))), ["a", "b"])[1] == ["b"]


def test_when_nobody_is_named_those_that_do_not_answer_are_left_out() -> None:
    manager = Manager(["a", "b"])
    manager.found_dead = ["b"]
    assert faults_of(manager).survive(failing(EngineError("b did not score the probe")), ["a", "b"])[1] == ["a"]


def test_when_nobody_is_to_blame_the_error_propagates() -> None:
    with pytest.raises(EngineError, match="too long"):
        faults_of(Manager(["a"])).survive(failing(EngineError("too long")), ["a"])


def test_without_fault_tolerance_the_error_propagates() -> None:
    manager = Manager(["a", "b"])
    with pytest.raises(WeightSyncError, match="engine a: EngineError: reset"):
        faults_of(manager, tolerant=False).survive(failing(torn("a")), ["a", "b"])
    assert manager.calls == []


def test_other_errors_are_not_the_engines() -> None:
    with pytest.raises(ZeroDivisionError):
        faults_of(Manager(["a"])).survive(failing(ZeroDivisionError()), ["a"])


@pytest.mark.parametrize("colocated", [False, True])
def test_the_last_engine_is_replaced_in_the_memory_that_it_needs(colocated: bool) -> None:
    manager = Manager(["a"])
    manager.replacements = ["new"]
    result, urls = faults_of(manager, colocated=colocated).survive(failing(torn("a")), ["a"], replace=True)
    assert result == urls == ["new"]
    dance = ["sleep", "start_lost_engines", "offload", "make room", "onload"] if colocated else ["start_lost_engines"]
    assert manager.calls == ["lose_engines", *dance]


def test_engines_that_are_started_before_an_update_get_room_once() -> None:
    """SGLang's scheduler ends at a second resume; the update itself is what gives them room for weights."""
    manager = Manager([])
    manager.replacements = ["new"]
    assert faults_of(manager, colocated=True).targets() == ["new"]
    assert manager.calls == ["begin_update", "sleep", "start_lost_engines", "offload", "make room"]


def test_when_all_were_lost_the_next_that_comes_is_looked_after() -> None:
    manager = Manager([])
    faults = faults_of(manager)
    faults.run.engine_urls, faults.run.actor = ["a"], object()
    faults.run.trained = faults.run.updated_after = 3
    healed: list[str] = []
    faults.run.heal = healed.extend
    faults.served([])
    manager.unsynced = ["new"]
    faults.tend()
    assert healed == ["new"]


def test_no_evaluation_gets_newer_weights_while_an_engine_serves() -> None:
    manager = Manager(["a"], ["new"])
    faults = faults_of(manager)
    faults.run.engine_urls, faults.run.actor = ["a"], object()
    faults.run.trained, faults.run.updated_after = 3, 2
    updates: list[str] = []
    faults.run.update_weights = lambda: updates.append("all")
    faults.tend(keep_version=True)
    assert updates == []
    faults._next = 0.0
    faults.tend()
    assert updates == ["all"]
    manager.serving, faults._next = [], 0.0
    faults.tend(keep_version=True)
    assert updates == ["all"] * 2, "or nobody would answer"


def test_colocated_a_new_engine_waits_for_the_next_update_and_nobody_says_otherwise() -> None:
    manager = Manager(["a"], ["new"])
    faults = faults_of(manager, colocated=True)
    faults.run.engine_urls, faults.run.actor = ["a"], object()
    notes: list[str] = []
    faults.run.display.note = notes.append
    faults.tend()
    assert notes == [] and manager.calls == ["engine_status"]


def test_the_last_engine_without_replacement_leaves_none() -> None:
    assert faults_of(Manager(["a"])).survive(failing(torn("a")), ["a"]) == (None, [])


def test_targets_are_engines_that_serve_and_those_that_wait_for_weights() -> None:
    manager = Manager(["a"], ["b"])
    assert faults_of(manager).targets() == ["a", "b"]
    manager.fatal = "no engine is left"
    with pytest.raises(EnginesLost, match="no engine is left"):
        faults_of(manager).targets()
