"""Engines that die, hang or are cut off: noticed, replaced, and never asked before they hold the
current weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from make_args import make_args

from slime.cluster import engine as engine_module
from slime.cluster.engine import EngineStatus, FleetSettings
from slime.cluster.engine_calls import start_lost_engines
from slime.cluster.engine_fleet import EngineFleet
from slime.cluster.health import HealthMonitor, answers
from slime.engines.http import close_session, post
from slime.engines.keys import RunKeys
from slime.engines.launch import EngineSettings, EngineSpec, RouterSettings
from slime.engines.process import EngineProcess, ServerFailed
from slime.engines.router import Worker
from slime.plugins.embedded.server import start_embedded_engine
from slime.utils.async_utils import run
from slime.weights.settings import WeightSyncSettings
from slime.weights.transports import ranks_of_engines


class FakeActor:
    """The handle of an actor: a call returns what ``get`` of the door below calls."""

    def __init__(self, host: Any) -> None:
        self.host = host

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(
            remote=lambda *asked: getattr(self.host, asked[0] if asked else name)
        )


@pytest.fixture(autouse=True)
def actors_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    door = SimpleNamespace(
        get=lambda calls, timeout: [call() for call in calls], kill=lambda actor: None
    )
    monkeypatch.setattr(engine_module, "door", lambda: door)


class FakeHost:
    """The actor of an engine without a process."""

    def __init__(self, url: str, starts: bool = True) -> None:
        self.url, self.starts, self.running, self.killed, self.stopped = url, starts, True, 0, 0

    def wait_ready(self) -> str:
        if not self.starts:
            raise ServerFailed("out of memory")
        return self.url

    def describe(self) -> dict[str, Any]:
        return {"url": self.url, "pid": 1, "alive": self.running, "fate": ": why"}

    def log_tail(self) -> str:
        return "last line"

    def cpu_seconds(self) -> float:
        return 1.0

    def kill(self) -> None:
        self.running = False
        self.killed += 1

    def stop(self) -> None:
        self.stopped += 1


class FakeRouter:
    """Knows its workers."""

    url, pid = "http://127.0.0.1:1", 1

    def __init__(self) -> None:
        self.known: list[str] = []
        self.ended = False
        self.refuses: Callable[[str], bool] = lambda url: False
        self.by_model = {"default": self}

    def dead(self) -> list[tuple[str, str]]:
        return [("default", "the router ended")] if self.ended else []

    def restart(self, model: str, workers: list[Worker]) -> None:
        for worker in workers:
            if self.refuses(worker.url):
                raise ServerFailed(f"the router did not take {worker.url}")
        self.ended, self.known = False, [worker.url for worker in workers]

    def add_worker(self, worker: Worker) -> None:
        if self.refuses(worker.url):
            raise ServerFailed(f"the router did not take {worker.url}")
        self.known.append(worker.url)

    def remove_worker(self, url: str) -> None:
        if url in self.known:
            self.known.remove(url)

    def stop(self) -> None: ...


def fleet_settings(tolerant: bool = True, **router: Any) -> FleetSettings:
    return FleetSettings(
        RouterSettings(**router), tolerant, always_routed=tolerant, updated=True, start_seconds=60.0
    )


def specs(count: int) -> list[EngineSpec]:
    return [EngineSpec(index, "model", slot=index) for index in range(count)]


def monitor_of(
    fleet: EngineFleet,
    interval: float,
    timeout: float,
    first_wait: float = 0.0,
    start_seconds: float = 0.0,
) -> HealthMonitor:
    fleet.settings = dataclasses.replace(
        fleet.settings, check_interval=interval, check_timeout=timeout, first_wait=first_wait,
        start_seconds=start_seconds,
    )  # fmt: skip
    return HealthMonitor(fleet)


class Started:
    """A fleet of fake hosts that serves."""

    def __init__(
        self, tmp_path: Path, tolerant: bool = True, count: int = 2, external: tuple[str, ...] = ()
    ) -> None:
        self.hosts: list[FakeHost] = []
        self.fails = False
        self.fleet = EngineFleet(
            fleet_settings(tolerant), tmp_path, self.launch, specs(count), external, RunKeys()
        )
        self.fleet.router = FakeRouter()
        self.fleet.start_routers = lambda: None
        self.fleet.start(lambda done, total: None)
        self.fleet.router.known = self.fleet.urls()

    def launch(self, index: int) -> list[Any]:
        self.hosts.append(FakeHost(f"http://127.0.0.1:{5000 + len(self.hosts)}", not self.fails))
        return [FakeActor(self.hosts[-1])]


def test_other_work_waits_for_every_launch_and_delays_none(tmp_path: Path) -> None:
    order: list[str] = []

    def launch(index: int) -> Any:
        order.append(f"launch {index}")
        return ["its actor"]

    fleet: Any = EngineFleet(fleet_settings(), tmp_path, launch, specs(2), (), RunKeys())
    fleet.wait_ready, fleet.start_routers = (
        (lambda engine: order.append(f"wait {engine.index}")),
        lambda: None,
    )
    fleet.begin()  # launches them before; each is launched once
    assert order == ["launch 0", "launch 1"]
    fleet.start(lambda done, total: None)
    assert order == ["launch 0", "launch 1", "wait 0", "wait 1"]


def test_a_lost_engine_serves_again_only_after_it_was_synced(tmp_path: Path) -> None:
    started = Started(tmp_path)
    fleet, (first, second) = started.fleet, started.hosts
    fleet.lose({first.url: "struck"})
    fleet.lose({first.url: "struck again"})  # nothing more happens
    assert first.killed == 1 and fleet.router.known == [second.url] and fleet.urls() == [second.url]
    fleet.restart_lost()
    fleet.settled()
    assert sorted(fleet.urls()) == [second.url, started.hosts[2].url]
    slots = {second.url: range(1, 2), started.hosts[2].url: range(0, 1)}
    assert fleet.status() == EngineStatus([second.url], [started.hosts[2].url], slots, fatal=None)
    assert fleet.router.known == [second.url], "not before it holds the weights"
    fleet.synced([second.url, started.hosts[2].url])
    assert fleet.router.known == [second.url, started.hosts[2].url]
    counts = {
        "rollout/engine_lost_count": 1,
        "rollout/engine_restart_count": 1,
        "rollout/router_restart_count": 0,
    }
    assert fleet.counts() == counts and not any(fleet.counts().values())
    fleet.stop()
    assert second.stopped == started.hosts[2].stopped == 1


def test_an_engine_that_is_still_being_ended_is_started_again_on_demand(tmp_path: Path) -> None:
    """The monitor lost the only engine just before an update, which looks away from then on and
    needs another one.
    """
    started = Started(tmp_path, count=1)
    fleet, may_end = started.fleet, threading.Event()
    started.hosts[0].kill = lambda: may_end.wait(60)  # type: ignore[method-assign,assignment]
    fleet.end(fleet.mark_lost({started.hosts[0].url: "struck"}), wait=False)
    timer = threading.Timer(0.3, may_end.set)
    timer.start()
    status = start_lost_engines(fleet)
    timer.join()
    assert status.unsynced == [started.hosts[1].url] and status.fatal is None
    fleet.stop()


def test_without_fault_tolerance_a_loss_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    started = Started(tmp_path, tolerant=False)
    started.fleet.lose({started.hosts[0].url: "its process 1 ended"})
    fatal = started.fleet.status().fatal
    assert "engine 0 (http://127.0.0.1:5000)" in fatal and "process 1" in fatal
    assert "--use-fault-tolerance" in fatal
    started.fleet.restart_lost()
    assert len(started.hosts) == 2
    assert "DEAD" in started.fleet.report() and "last line" in started.fleet.report()


def test_an_engine_that_never_comes_back_is_given_up(tmp_path: Path) -> None:
    started = Started(tmp_path, count=1)
    started.fails = True
    started.fleet.lose({started.hosts[0].url: "struck"})
    until = time.monotonic() + 60
    while started.fleet.fatal is None:
        started.fleet.restart_lost()
        assert time.monotonic() < until
        time.sleep(0.005)
    assert len(started.hosts) == started.fleet.engines[0].most_losses
    assert "no engine" in started.fleet.fatal and "out of memory" in started.fleet.fatal


def test_losses_of_long_ago_are_forgotten(tmp_path: Path) -> None:
    started = Started(tmp_path, count=1)
    (engine,) = started.fleet.engines
    engine.losses = [time.monotonic() - engine.losses_seconds - 1.0] * engine.most_losses
    started.fleet.lose({engine.url: "struck"})
    assert engine.state == "lost" and started.fleet.fatal is None
    started.fleet.stop()


def test_external_engines_are_watched_but_not_started(tmp_path: Path) -> None:
    url = "http://127.0.0.1:9"
    started = Started(tmp_path, count=1, external=(url,))
    fleet = started.fleet
    fleet.lose({url: "cannot be reached"})
    fleet.restart_lost()
    assert len(started.hosts) == 1 and fleet.fatal is None
    assert "by hand" in fleet.report()
    fleet.readmit([url])
    assert fleet.urls("unsynced") == [url] and url not in fleet.router.known
    fleet.synced([url])
    assert url in fleet.router.known
    fleet.lose({url: "cannot be reached"})
    fleet.lose({started.hosts[0].url: "struck"})
    assert fleet.fatal is None  # ours comes back


def test_external_engines_are_divided_among_senders(tmp_path: Path) -> None:
    """By their slots, as the engines of the run are; and a slash at the end of an address belongs
    to no path.
    """
    started = Started(tmp_path, count=0, external=("http://10.0.0.1:1/", "http://10.0.0.2:1"))
    status, settings = (
        started.fleet.status(),
        WeightSyncSettings.from_args(make_args(update_weight_senders=2)),
    )
    assert status.serving == ["http://10.0.0.1:1", "http://10.0.0.2:1"]
    ranks = ranks_of_engines(settings, status.serving, status.slots, 2, same_host=False)
    assert [list(ranks[url]) for url in status.serving] == [[0], [1]]


def test_engines_with_weights_of_their_own_serve_as_soon_as_they_are_up(tmp_path: Path) -> None:
    """A reference or reward model next to the trained one: nobody would ever send it weights."""
    started = Started(tmp_path)
    fleet, host = started.fleet, started.hosts[1]
    fleet.engines[1].spec = EngineSpec(1, "judge", model="judge", updates=False)
    fleet.lose({host.url: "struck"})
    fleet.restart_lost()
    fleet.settled()
    wait_until(lambda: not fleet.urls("unsynced"))  # its own thread lets it serve
    assert started.hosts[2].url in fleet.router.known
    started.fails = True
    while fleet.fatal is None:
        fleet.lose({started.hosts[2].url: "struck"})
        fleet.restart_lost()
        time.sleep(0.005)
    assert "(regular) of model judge" in fleet.fatal


class GoneHost(FakeHost):
    """Its actor ends with the server: once killed, nobody answers."""

    def describe(self) -> dict[str, Any]:
        if self.killed:
            raise RuntimeError("the actor died")
        return super().describe()

    log_tail = lambda self: "last line" if not self.killed else self.describe()  # type: ignore[assignment]  # noqa: E731


def test_the_report_names_engines_whose_actors_are_gone(tmp_path: Path) -> None:
    started = Started(tmp_path)
    for host in started.hosts:
        host.__class__ = GoneHost
    fleet = started.fleet
    fleet.engines[0].losses = [time.monotonic()] * fleet.engines[0].most_losses
    fleet.lose({started.hosts[0].url: "struck"})
    assert fleet.engines[0].state == "given up"
    started.hosts[1].killed = 1  # and nobody has noticed yet
    report = fleet.report()
    assert report.count("DEAD") == 2 and "last line" in report and "actor died" in report
    fleet.stop()
    assert started.hosts[0].stopped == 0, "there is nobody to ask"


def test_a_router_that_ended_during_an_update_is_started_before_engines_join_it(
    tmp_path: Path,
) -> None:
    started = Started(tmp_path, count=3)
    fleet, (first, second, third) = started.fleet, started.hosts
    for engine in fleet.engines[:2]:
        engine.state = "unsynced"
    fleet.router.ended = True
    fleet.router.refuses = lambda url: url == first.url
    fleet.synced([first.url, second.url, third.url])
    assert not fleet.router.ended and fleet.router.known == [third.url, second.url]
    assert fleet.status().serving == [second.url, third.url] and fleet.urls("lost") == [first.url]


def test_an_engine_that_is_lost_while_it_joins_does_not_serve(tmp_path: Path) -> None:
    started = Started(tmp_path)
    fleet, (first, _) = started.fleet, started.hosts
    fleet.engines[0].state = "unsynced"
    fleet.router.known.remove(first.url)
    join = fleet.router.add_worker

    def lost_meanwhile(worker: Worker) -> None:
        with fleet.lock:
            fleet.engines[0].state = "lost"
        join(worker)

    fleet.router.add_worker = lost_meanwhile
    fleet.synced([first.url])
    assert fleet.urls("lost") == [first.url] and first.url not in fleet.router.known


def look_until(monitor: HealthMonitor, done: Callable[[], bool], seconds: float = 60.0) -> None:
    """What the monitor's thread does, without its clock."""
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until
        monitor.poll()
        time.sleep(0.002)


class FrozenHost(FakeHost):
    """Its node answers nothing until the test is over."""

    over: threading.Event

    def describe(self) -> dict[str, Any]:
        self.over.wait(60)
        raise TimeoutError("no answer")

    def log_tail(self) -> str:
        self.over.wait(60)
        raise TimeoutError("no answer")

    def kill(self) -> None:
        self.over.wait(60)
        super().kill()


@pytest.fixture
def frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Started, HealthMonitor]]:
    """16 engines, the first 8 on a node that does not answer."""
    monkeypatch.setattr("slime.cluster.health.POLL_SECONDS", 0.01)
    monkeypatch.setattr("slime.cluster.health.unhealthy", lambda urls, timeout: {})
    started = Started(tmp_path, count=16)
    FrozenHost.over = threading.Event()
    for host in started.hosts[:8]:
        host.__class__ = FrozenHost
    yield started, monitor_of(started.fleet, interval=1000.0, timeout=0.1)
    FrozenHost.over.set()
    started.fleet.stop()


def test_a_frozen_node_delays_nobody(frozen: tuple[Started, HealthMonitor]) -> None:
    """Neither looks at other engines nor the pause before a weight update, before and after it is
    given up.
    """
    started, monitor = frozen
    fleet, hosts = started.fleet, started.hosts
    monitor.poll()
    hosts[9].running = False
    look_until(monitor, lambda: hosts[9].url not in fleet.urls())
    monitor.pause("update")
    assert len(fleet.urls("serving")) == 15
    monitor.resume("update")

    def silent() -> dict[str, Any]:
        raise TimeoutError("no answer")

    for host in hosts[:8]:
        host.describe = silent  # type: ignore[method-assign]
    FrozenHost.over.set()
    FrozenHost.over = threading.Event()  # describe gave up; log_tail and kill hang
    look_until(monitor, lambda: len(fleet.urls("serving")) == 7)
    assert not any(host.killed for host in hosts[:8])
    hosts[10].running = False
    look_until(monitor, lambda: hosts[10].url not in fleet.urls())
    monitor.pause("update")
    assert len(fleet.urls("serving")) == 6
    monitor.resume("update")
    FrozenHost.over.set()
    look_until(monitor, lambda: len(fleet.urls("unsynced")) == 10)
    assert all(host.killed for host in [*hosts[:8], hosts[9], hosts[10]])


def test_what_was_asked_before_a_pause_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that loads weights or has released its memory makes no token."""
    started = Started(tmp_path)
    fleet = started.fleet
    monitor = monitor_of(fleet, interval=0.0, timeout=0.1, first_wait=1000.0)
    asked, answer, answered = threading.Event(), threading.Event(), threading.Event()

    def hang(urls: Any, timeout: float) -> dict[str, str]:
        asked.set()
        answer.wait(60)
        return {url: "no token" for url in urls}

    monkeypatch.setattr("slime.cluster.health.unhealthy", hang)
    monkeypatch.setattr("slime.cluster.health.MAX_MISSED", 1)
    monkeypatch.setattr("slime.cluster.health.SEND_SECONDS", 0.01)
    monitor.next_check = 0.0
    monitor.poll()
    assert asked.wait(60)
    monitor.pause("update")  # returns although the check is under way
    assert monitor.checking is not None
    monitor.checking.add_done_callback(lambda _: answered.set())
    answer.set()
    assert answered.wait(60)
    assert len(fleet.urls("serving")) == 2 and fleet.counts()["rollout/engine_lost_count"] == 0
    fleet.stop()


def test_an_engine_that_ends_while_a_pause_begins_is_not_lost(tmp_path: Path) -> None:
    """Engines that are shut down or asleep are the pause's own work; what is really gone is seen
    after it.
    """
    started = Started(tmp_path)
    monitor = monitor_of(started.fleet, interval=1000.0, timeout=0.1)
    ended = monitor.processes.ended

    def paused_meanwhile(seconds: float) -> dict[str, str]:
        gone = ended(seconds)
        monitor.pause("update")
        return gone

    monitor.processes.ended = paused_meanwhile  # type: ignore[method-assign]
    started.hosts[0].running = False
    monitor.poll()
    assert len(started.fleet.urls()) == 2
    started.fleet.stop()


def test_a_colocated_step_neither_causes_a_check_nor_waits_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engines are paused and go on in each step, while one answer of SGLang takes more than a
    second.
    """
    now, answer, checks = [1000.0], threading.Event(), list[float]()

    def hang(urls: Any, timeout: float) -> dict[str, str]:
        answer.wait(60)
        return {}

    def no_wait(*_: object) -> None:
        raise AssertionError("a pause has waited")

    monkeypatch.setattr("slime.cluster.health.unhealthy", hang)
    monkeypatch.setattr("slime.cluster.health.time", SimpleNamespace(monotonic=lambda: now[0]))
    started = Started(tmp_path)
    monitor = monitor_of(started.fleet, interval=30.0, timeout=0.1)
    monkeypatch.setattr(monitor.processes, "ended", lambda seconds: {})
    monkeypatch.setattr("slime.cluster.health.wait", no_wait)
    for _ in range(60):  # steps of two seconds
        monitor.pause("offloaded")
        now[0] += 1.0
        monitor.resume("offloaded")
        before = monitor.checking
        monitor.poll()
        now[0] += 1.0
        if monitor.checking is not before:
            checks.append(now[0] - 1000.0)
            monitor.pause("update")  # returns while the check is under way
            assert monitor.checking is not None and not monitor.checking.done()
            monitor.resume("update")
            answer.set()
            monitor.checking.result(60)
            answer.clear()
    assert checks == [32.0, 62.0, 92.0]
    started.fleet.stop()


def test_a_failed_request_causes_a_check_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Started(tmp_path)
    checks: list[int] = []
    checked = threading.Event()

    def note(urls: Any, timeout: float) -> dict[str, str]:
        checks.append(len(urls))
        if urls:
            checked.set()
        return {}

    monkeypatch.setattr("slime.cluster.health.unhealthy", note)
    monitor = monitor_of(started.fleet, interval=1000.0, timeout=0.1)
    monitor.poll()
    assert not checks
    monitor.start()
    monitor.wake()
    monitor.wake()
    assert checked.wait(60)
    monitor.stop()
    assert checks.count(2) == 1, "many failures at once are one check"
    monitor.settings = dataclasses.replace(monitor.settings, first_wait=1000.0)
    monitor.resume("update")
    monitor.wakes_from = 0.0
    monitor.wake()
    assert monitor.next_check > time.monotonic() + 900, "the grace after a pause holds"


@pytest.mark.parametrize(
    ("age", "used", "reason", "lost"),
    [
        (10.0, 0.9, "no token within 30 s", False),  # it compiles its kernels
        (10.0, 0.0, "no token within 30 s", True),
        (1000.0, 0.9, "no token within 30 s", True),
        (10.0, 0.9, "cannot be reached", True),
    ],
)
def test_a_young_engine_that_works_is_left_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    age: float,
    used: float,
    reason: str,
    lost: bool,
) -> None:
    started = Started(tmp_path, count=1)
    (url,) = started.fleet.urls()
    started.fleet.engines[0].ready_at = time.monotonic() - age
    total = iter(range(100))
    started.hosts[0].cpu_seconds = lambda: next(total) * used  # type: ignore[method-assign]
    monkeypatch.setattr("slime.cluster.health.unhealthy", lambda urls, timeout: {url: reason})
    monkeypatch.setattr("slime.cluster.health.time.sleep", lambda seconds: None)
    monitor = monitor_of(started.fleet, interval=1.0, timeout=30.0, start_seconds=900.0)
    for _ in range(2):
        assert started.fleet.urls() == [url]
        monitor.check([url])
    assert (started.fleet.urls() == []) == lost
    started.fleet.stop()


def test_a_router_start_leaves_the_fleet_free_and_takes_back_what_was_lost_meanwhile(
    tmp_path: Path,
) -> None:
    started = Started(tmp_path, count=3)
    fleet = started.fleet
    started_again, go_on = threading.Event(), threading.Event()
    restart = fleet.router.restart

    def slow(model: str, workers: list[Worker]) -> None:
        started_again.set()
        assert go_on.wait(60)
        restart(model, workers)

    fleet.router.restart, fleet.router.ended = slow, True
    looking = threading.Thread(target=fleet.check_router)
    looking.start()
    assert started_again.wait(60)
    lost = started.hosts[0].url
    fleet.lose({lost: "struck"})
    assert lost not in fleet.status().serving
    go_on.set()
    looking.join(60)
    assert not looking.is_alive() and fleet.router.known == [host.url for host in started.hosts[1:]]
    fleet.stop()


@pytest.mark.parametrize("blow", ["ended", "hangs"])
def test_router_and_engine_that_end_together_both_come_back(tmp_path: Path, blow: str) -> None:
    """A router does not start with a worker that is dead: the engine must be found first, or in
    spite of that.
    """
    started = Started(tmp_path)
    fleet, (first, second) = started.fleet, started.hosts
    monitor = monitor_of(fleet, interval=0.0, timeout=0.1)
    first.running = blow == "hangs"
    fleet.router.ended = True
    fleet.router.refuses = lambda url: url == first.url
    with pytest.MonkeyPatch.context() as patch:
        hung = {first.url: "no token"} if blow == "hangs" else {}
        patch.setattr(
            "slime.cluster.health.unhealthy",
            lambda urls, timeout: {u: w for u, w in hung.items() if u in urls},
        )
        patch.setattr("slime.cluster.health.RECHECK_SECONDS", 0.0)
        # either may be the first to come back
        look_until(monitor, lambda: bool(fleet.urls("unsynced")) and not fleet.router.ended)
    assert not fleet.router.ended and fleet.router.known == [second.url]
    assert first.killed == 1 and fleet.urls("unsynced") == [started.hosts[2].url]
    fleet.stop()


def test_nobody_is_looked_at_while_paused(tmp_path: Path) -> None:
    started = Started(tmp_path, count=1)
    monitor = monitor_of(started.fleet, interval=0.01, timeout=0.2, first_wait=60.0)
    looks: list[float] = []
    monitor.poll = lambda: looks.append(time.monotonic())  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slime.cluster.health.POLL_SECONDS", 0.005)
        monitor.pause("update")
        monitor.pause("offloaded")
        monitor.start()
        time.sleep(0.05)
        monitor.resume("update")
        time.sleep(0.05)
        assert not looks
        monitor.resume("offloaded")
        until = time.monotonic() + 60
        while not looks:
            assert time.monotonic() < until
            time.sleep(0.005)
        monitor.stop()
    assert monitor.next_check > time.monotonic() + 30, "grace after a pause"


def test_without_fault_tolerance_one_late_answer_is_forgiven(tmp_path: Path) -> None:
    started = Started(tmp_path, tolerant=False, count=1)
    (url,) = started.fleet.urls()
    monitor = monitor_of(started.fleet, interval=1.0, timeout=0.2)
    with pytest.MonkeyPatch.context() as patch:
        said: list[dict[str, str]] = [{url: "late"}, {}, {url: "late"}, {url: "late"}]
        patch.setattr("slime.cluster.health.unhealthy", lambda urls, timeout: said.pop(0))
        for _ in range(4):
            monitor.check([url])
        assert started.fleet.fatal is None
        said.append({url: "late"})
        monitor.check([url])
    assert started.fleet.fatal is not None


def test_a_process_that_ends_just_before_its_engine_is_asked_is_named(tmp_path: Path) -> None:
    started = Started(tmp_path, tolerant=False, count=2)
    first, second = started.hosts
    monitor = monitor_of(started.fleet, interval=1.0, timeout=0.2)

    def refused(urls: Any, timeout: float) -> dict[str, str]:
        first.running = False
        return {first.url: "cannot be reached"}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slime.cluster.health.unhealthy", refused)
        monitor.check([first.url, second.url])
    assert "process 1" in str(started.fleet.fatal) and monitor.missed == {}


@pytest.mark.parametrize("status", [401, 404, 503])
def test_an_engine_that_refuses_is_not_healthy(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.cluster.health.RETRY_SECONDS", 0.0)

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert (
            answers(f"http://127.0.0.1:{server.server_port}", 30.0)
            == f"/health_generate answered {status}"
        )
        server.shutdown()


def test_a_port_that_accepts_and_says_nothing_is_a_hang() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert "within 0.2 s" in answers(url, 0.2) or ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slime.cluster.health.RETRY_SECONDS", 0.01)
        assert "reached" in answers(url, 0.2) or ""


# --- real engines and a real router ----------------------------------------------------------


class LocalHost:
    """An engine process on this machine, if wanted behind a proxy that can cut it off."""

    def __init__(self, process: EngineProcess, proxy: Proxy | None) -> None:
        self.process, self.proxy = process, proxy

    def wait_ready(self) -> str:
        self.process.wait_ready(120)
        return self.proxy.url if self.proxy else self.process.url

    def describe(self) -> dict[str, Any]:
        return {
            "url": self.process.url,
            "pid": self.process.pid,
            "alive": self.process.alive(),
            "fate": "",
        }

    def log_tail(self) -> str:
        return self.process.log_tail()

    def kill(self) -> None:
        self.process.kill()

    def stop(self) -> None:
        self.process.stop()


class Proxy:
    """Passes TCP on to a port until it is cut; then every connection is reset and none is
    accepted.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self.listener.accept()
                there = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                return
            self.open += [here, there]
            for source, sink in ((here, there), (there, here)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def cut(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for end in self.open:
            try:
                end.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00"
                )
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of one layer; requests are token ids, so it needs no real tokenizer."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", eos_token="w1").save_pretrained(
        folder
    )
    torch.manual_seed(0)
    shape = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=64,
    )
    LlamaForCausalLM(
        LlamaConfig(**shape, max_position_embeddings=2048, eos_token_id=1)
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def real_fleet(
    tiny: Path, tmp_path: Path
) -> Iterator[Callable[..., tuple[EngineFleet, HealthMonitor]]]:
    started: list[tuple[EngineFleet, HealthMonitor]] = []
    processes: list[EngineProcess] = []

    def start(
        count: int, behind_proxy: bool = False, interval: float = 0.5
    ) -> tuple[EngineFleet, HealthMonitor]:
        settings = EngineSettings(
            str(tiny), dtype="float32", device="cpu", max_running_requests=16, max_total_tokens=16384,
            deterministic=True, threads=1,
        )  # fmt: skip

        def launch(index: int) -> list[Any]:
            log = tmp_path / f"engine-{len(processes)}.log"
            processes.append(start_embedded_engine(settings, index, log_path=log))
            port = int(processes[-1].url.rsplit(":", 1)[1])
            return [FakeActor(LocalHost(processes[-1], Proxy(port) if behind_proxy else None))]

        router = {"request_seconds": 120, "options": {"policy": "round_robin"}}
        fleet = EngineFleet(fleet_settings(**router), tmp_path, launch, specs(count), (), RunKeys())
        fleet.start(lambda done, total: None)
        monitor = monitor_of(fleet, interval, timeout=10.0)
        monitor.start()
        started.append((fleet, monitor))
        return fleet, monitor

    yield start
    for fleet, monitor in started:
        monitor.stop()
        fleet.stop()
    for process in processes:
        process.kill()
    run(close_session())


def body(seed: int, new: int) -> dict[str, Any]:
    sampling = {
        "max_new_tokens": new,
        "ignore_eos": True,
        "sampling_seed": seed,
        "temperature": 1.0,
    }
    return {"input_ids": [5 + seed % 50, 6], "sampling_params": sampling, "return_logprob": True}


async def ask_and_strike(
    url: str, strike: Callable[[], None], count: int = 12, new: int = 700
) -> list[list[int]]:
    """Token ids of ``count`` requests, while which ``strike`` is called."""
    tasks = [
        asyncio.ensure_future(post(f"{url}/generate", body(i, new), max_retries=200))
        for i in range(count)
    ]
    await asyncio.sleep(0.5)
    assert sum(task.done() for task in tasks) < count
    await asyncio.to_thread(strike)
    answers = await asyncio.wait_for(asyncio.gather(*tasks), 200)
    return [
        [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]] for answer in answers
    ]


def wait_until(done: Callable[[], bool], seconds: float = 90.0) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize(
    "blow", ["killed", *(pytest.param(x, marks=pytest.mark.long) for x in ("stopped", "cut off"))]
)
def test_requests_of_a_lost_engine_are_done_elsewhere_to_the_same_tokens(
    real_fleet: Any, blow: str
) -> None:
    fleet, monitor = real_fleet(2, behind_proxy=blow == "cut off")
    victim = fleet.engines[0]
    host = victim.actors[0].host
    url, process = victim.url, host.process
    quiet = run(ask_and_strike(fleet.router.url, lambda: None))

    def strike() -> None:
        if blow == "cut off":
            host.proxy.cut()
        else:
            os.kill(process.pid, signal.SIGKILL if blow == "killed" else signal.SIGSTOP)

    assert run(ask_and_strike(fleet.router.url, strike)) == quiet
    wait_until(lambda: not process.alive())  # also one that is stopped or cut off is ended
    wait_until(lambda: bool(fleet.urls("unsynced")))
    assert [worker["url"] for worker in fleet.router.by_model["default"].workers()] == [
        fleet.engines[1].url
    ]
    (fresh,) = fleet.urls("unsynced")
    assert fresh != url
    fleet.synced([fresh])
    assert {worker["url"] for worker in fleet.router.by_model["default"].workers()} == {
        fresh,
        fleet.engines[1].url,
    }
    assert fleet.counts()["rollout/engine_lost_count"] == 1
    assert monitor.missed == {}


@pytest.mark.real
@pytest.mark.slow
def test_a_router_that_is_killed_is_started_again_on_its_port(real_fleet: Any) -> None:
    fleet, _ = real_fleet(1)
    url = fleet.router.url
    quiet = run(ask_and_strike(url, lambda: None, count=4))
    again = run(
        ask_and_strike(
            url, lambda: os.kill(fleet.router.by_model["default"].pid, signal.SIGKILL), count=4
        )
    )
    assert again == quiet and fleet.router.url == url
    assert fleet.counts()["rollout/router_restart_count"] == 1


def test_engines_that_are_ended_at_once_are_killed_all_at_the_same_time() -> None:
    """Also those that are being started; the shutdown that follows finds nothing to do."""
    met = threading.Barrier(3)

    class Host(FakeHost):
        def kill(self) -> None:
            super().kill()
            met.wait(60)

    hosts = [Host(f"http://127.0.0.1:{number}") for number in (2, 3, 4)]
    fleet = EngineFleet(
        fleet_settings(),
        Path("/tmp"),
        lambda index: [FakeActor(hosts[index])],
        [EngineSpec(i, "") for i in range(3)],
        (),
        RunKeys(),
    )
    for engine, host, state in zip(
        fleet.engines, hosts, ("serving", "unsynced", "starting"), strict=True
    ):
        engine.actors, engine.url, engine.state = [FakeActor(host)], host.url, state
    fleet.stop(now=True)
    assert [host.killed for host in hosts] == [1, 1, 1] and not any(host.stopped for host in hosts)
    fleet.stop()
    assert [host.killed for host in hosts] == [1, 1, 1]
