"""The engines as the rollout manager's process holds them: who is lost after a failed call, and
when checks pause.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from slime.cluster import engine_calls
from slime.cluster.engine_calls import CONTROL_DEADLINE_SECONDS
from slime.engines.sglang_api import EngineError

URLS = ["http://127.0.0.1:1", "http://127.0.0.1:2"]


class Held:
    """A fleet with a monitor that write down what they are told."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tolerant: bool = True,
        gone: dict[str, str] | None = None,
    ) -> None:
        self.lost: list[dict[str, str]] = []
        self.checks: list[str] = []
        self.fleet: Any = SimpleNamespace(
            settings=SimpleNamespace(tolerant=tolerant, check_timeout=1.0), urls=lambda: URLS,
            status=lambda: "the status", lose=self.lost.append,
            synced=lambda urls: self.checks.append(f"synced {len(urls)}"), settled=lambda: URLS,
        )  # fmt: skip
        self.fleet.monitor = SimpleNamespace(
            pause=lambda reason: self.checks.append(f"pause {reason}"),
            resume=lambda reason: self.checks.append(f"resume {reason}"),
            processes=SimpleNamespace(ended=lambda seconds: gone or {}),
        )
        monkeypatch.setattr(
            "slime.cluster.engine_calls.unhealthy", lambda urls, timeout: {URLS[1]: "no token"}
        )


@pytest.mark.parametrize(
    ("blamed", "gone", "lost"),
    [
        ({URLS[0]: "reset"}, {}, {URLS[0]: "reset"}),
        ({URLS[0]: "reset"}, {URLS[1]: "ended"}, {URLS[0]: "reset", URLS[1]: "ended"}),
        ({}, {URLS[0]: "ended"}, {URLS[0]: "ended"}),
        ({}, {}, {URLS[1]: "no token"}),
        (None, {URLS[0]: "ended"}, {URLS[0]: "ended"}),
        (None, {}, {}),
    ],
)
def test_tokens_are_asked_for_only_where_nobody_else_is_to_blame(
    monkeypatch: pytest.MonkeyPatch,
    blamed: dict[str, str] | None,
    gone: dict[str, str],
    lost: dict[str, str],
) -> None:
    held = Held(monkeypatch, gone=gone)
    assert engine_calls.lose_engines(held.fleet, blamed) == "the status"  # type: ignore[comparison-overlap]
    assert held.lost == [lost]


def test_checks_pause_from_the_begin_of_an_update_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held(monkeypatch)
    engine_calls.begin_update(held.fleet)
    engine_calls.end_update(held.fleet, URLS)
    assert held.checks == ["pause update", "synced 2", "resume update"]


@pytest.mark.parametrize("tolerant", [True, False])
def test_an_engine_that_does_not_take_its_memory_back_is_lost(
    monkeypatch: pytest.MonkeyPatch, tolerant: bool
) -> None:
    held = Held(monkeypatch, tolerant)

    async def on_each(engines: Any, call: Any, *_: Any) -> Any:
        await asyncio.sleep(0)
        return {}, {URLS[0]: EngineError("out of memory")}

    monkeypatch.setattr("slime.cluster.engine_calls.on_each", on_each)
    if not tolerant:
        with pytest.raises(EngineError, match="out of memory"):
            engine_calls.onload(held.fleet, ("kv_cache",))
        return
    engine_calls.onload(held.fleet, ("weights",))
    assert held.lost == [{URLS[0]: "out of memory"}] and held.checks == []
    engine_calls.onload(held.fleet, ("kv_cache",))
    assert held.checks == ["resume offloaded"]


def test_engines_may_take_the_whole_deadline_to_release_and_resume_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first release of SGLang with a copy of its weights pins the host memory for all of
    them.
    """
    limits: dict[str, float] = {}

    async def request(method: str, url: str, body: object, seconds: float) -> Any:
        limits[url.rpartition("/")[2]] = seconds
        return {"loads": []}

    monkeypatch.setattr("slime.engines.handle.request", request)
    held = Held(monkeypatch)
    engine_calls.offload(held.fleet)
    engine_calls.onload(held.fleet, ("weights",))
    asked = limits["release_memory_occupation"], limits["resume_memory_occupation"]
    assert min(asked) >= CONTROL_DEADLINE_SECONDS and held.lost == [{}, {}]
