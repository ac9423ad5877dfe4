"""Waits over a real local Ray: deadlines with a report, failures of one rank, signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from slime.cluster.actors import ActorLost
from slime.cluster.ray_wait import Waiter, WaitExpired, wait_for
from slime.cluster.stop_signals import StopRequested, StopSignals
from slime.observability.run_state import StateFile

pytestmark = pytest.mark.real


class Worker:
    def work(self, seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()

    def die(self) -> None:
        os._exit(1)

    def fail(self) -> None:
        raise ValueError("bad row 7")

    def try_folder(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def status(self) -> dict:
        return {"phase": "multiply", "done": 3, "total": 8, "since": time.time() - 5}


@pytest.fixture(scope="module")
def worker_class() -> Iterator:
    from slime.plugins.actors.ray_cluster import connect

    connect()
    import ray

    from slime.cluster.actors import door

    # workers do not import this file
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield lambda: door().create(Worker, own_threads=True)
    ray.shutdown()


def test_a_wait_that_lasts_is_in_the_state_of_the_run(worker_class, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("slime.observability.run_state.WAIT_SECONDS", 0.3)
    seen = []

    class Watched(StateFile):
        def write(self, **changes: Any) -> None:
            super().write(**changes)
            seen.append(self._state)

    one, other, waited = worker_class(), worker_class(), Watched(tmp_path)
    stop = StopSignals()
    Waiter(stop, state=waited).get(
        [one.work.remote(3)], "the product", 60, actors={"rank 0": other}
    )
    assert {state.waiting for state in seen[:-1]} == {"the product"} and seen[-1].waiting == ""
    assert seen[-2].said["rank 0"]["total"] == 8 and seen[-2].deadline == 60
    count = len(seen)
    Waiter(stop, state=waited).get([one.work.remote(0)], "nothing", 30)
    assert len(seen) == count  # a short wait writes nothing


def test_the_private_cluster_listens_on_the_loopback_only(worker_class) -> None:
    import ray

    mine = psutil.Process().children(recursive=True)
    names = {p.name() for p in mine}
    assert {"raylet", "gcs_server"} <= names
    for process in mine:
        for connection in process.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN:
                address = connection.laddr.ip.removeprefix("::ffff:")
                assert address in ("127.0.0.1", "::1"), (process.name(), connection)
    assert ray.util.get_node_ip_address() == "127.0.0.1"


def test_results_in_order_with_status(worker_class) -> None:
    workers = [worker_class() for _ in range(2)]
    seen: list[dict] = []
    waiter = Waiter(StopSignals(), seen.append)
    refs = [workers[0].work.remote(1.5), workers[1].work.remote(0.0)]
    pids = waiter.get(refs, "work", 30, actors={"rank 0": workers[0]})
    assert len(set(pids)) == 2
    assert seen and seen[0]["phase"] == "multiply"


def test_expiry_says_what_the_processes_do(worker_class) -> None:
    worker = worker_class()
    waiter = Waiter(StopSignals())
    waiter.get([worker.work.remote(0.0)], "warm up", 30)
    with pytest.raises(
        WaitExpired, match=r"for rank 0 to work\n.*\n  rank 0: multiply 3/8 for \d s"
    ):
        waiter.get([worker.work.remote(20)], "rank 0 to work", 1.5, actors={"rank 0": worker})


def test_status_answers_while_a_folder_hangs_and_a_step_runs(worker_class) -> None:
    import ray

    worker = worker_class()
    ray.get(worker.work.remote(0.0))
    hanging = [worker.try_folder.remote(300), worker.work.remote(300)]
    assert ray.get(worker.status.remote(), timeout=60)["phase"] == "multiply"
    assert not ray.wait(hanging, timeout=0)[0]
    ray.kill(worker)


@pytest.mark.parametrize("failure", ["die", "fail"])
def test_one_failed_rank_ends_the_wait_for_all(worker_class, failure: str) -> None:
    healthy, broken = worker_class(), worker_class()
    with pytest.raises((ActorLost, ValueError)):  # and not that the wait has expired
        Waiter(StopSignals()).get(
            [healthy.work.remote(60), getattr(broken, failure).remote()], "both", 60
        )


def test_a_signal_ends_a_wait_unless_the_stop_is_deferred(worker_class) -> None:
    worker = worker_class()
    with StopSignals() as stop:
        waiter = Waiter(stop)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with stop.deferred():
            waiter.get([worker.work.remote(1.5)], "a training step", 30)
        assert stop.requested == "SIGTERM"
        with pytest.raises(StopRequested):
            waiter.get([worker.work.remote(30)], "generation", 60)


def test_a_frozen_actor_does_not_answer(worker_class, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from slime.cluster import run

    worker, dead = worker_class(), worker_class()
    pid = ray.get(worker.work.remote(0.0))
    assert run.answers(worker) and run.answers(dead)
    monkeypatch.setattr(run, "ASK_SECONDS", 1.0)
    os.kill(pid, signal.SIGSTOP)
    assert not run.answers(worker)
    ray.kill(worker)  # also one that is stopped
    ray.kill(dead)
    # Ray kills it in the background
    wait_for("the killed actor to be gone", lambda: not run.answers(dead), 60.0)
    until = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)


class Clock:
    """The time of :func:`wait_for`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_returns_the_first_true_result(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("slime.cluster.ray_wait.time", clock)
    answer = wait_for("x", lambda: clock.now >= 1 and "ready", 5, poll=0.4)
    assert answer == "ready"
    assert clock.now == pytest.approx(1.2)


def test_expiry_names_the_wait_and_adds_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("slime.cluster.ray_wait.time", clock)
    with pytest.raises(
        WaitExpired, match=r"waited 3 s \(deadline 3 s\) for engine 7\npid 12 alive"
    ):
        wait_for(
            "engine 7",
            lambda: False,
            3,
            report=lambda: "pid 12 alive",
        )
    assert clock.now == pytest.approx(3)


def test_an_error_of_the_condition_propagates() -> None:
    with pytest.raises(ZeroDivisionError):
        wait_for("x", lambda: 1 / 0, 1)
