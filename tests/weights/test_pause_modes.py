"""How an engine is paused: as little as its load allows, and with its old cache flushed."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from slime.engines.sglang_api import Capabilities, EngineError
from slime.weights.sync import sync_weights
from slime.weights.transports import SendResult
from slime.weights.window import UpdateWindow


class Engine:
    """Notes what it is asked."""

    def __init__(
        self,
        running: int = 0,
        retract: bool = True,
        slips_in: bool = False,
        version_spans: bool = True,
        adapter_cache_keys: bool = False,
        stragglers: int = 0,
    ) -> None:
        self.stragglers = stragglers
        self.url, self.running, self.slips_in = "engine", running, slips_in
        self.capabilities = Capabilities(
            retract=retract, version_spans=version_spans, adapter_cache_keys=adapter_cache_keys
        )
        self.asked: list[str] = []

    async def load(self) -> dict[str, Any]:
        return {"running": self.running, "waiting": 0, "tokens": 0}

    async def pause(self, mode: str) -> None:
        self.asked.append(mode)

    async def flush_cache(self) -> None:
        if self.slips_in and self.asked[-1] == "in_place":
            raise EngineError("not flushed: a request runs")
        if self.asked[-1] == "end" and self.stragglers:
            self.stragglers -= 1
            raise EngineError("not flushed: a request has left the tokenizer")
        self.asked.append("flush")

    async def abort(self) -> None:
        self.asked.append("end")

    async def continue_generation(self, empty_device_cache: bool) -> None:
        self.asked.append(f"continue, empty {empty_device_cache}")


@pytest.mark.parametrize(
    ("engine", "flag", "expected"),
    [
        (Engine(), None, ["in_place", "flush"]),
        (Engine(), "abort", ["in_place", "flush"]),
        (Engine(running=2), None, ["retract", "flush"]),
        (Engine(running=2, retract=False), None, ["end", "retract", "end", "flush"]),
        (
            Engine(running=2, retract=False, stragglers=1),
            "abort",
            ["end", "retract", "end", "abort", "flush"],
        ),
        (Engine(running=2), "abort", ["abort", "flush"]),
        (Engine(running=2), "in_place", ["in_place"]),
        (Engine(slips_in=True), None, ["in_place", "retract", "flush"]),
        (Engine(slips_in=True), "abort", ["in_place", "continue, empty False", "abort", "flush"]),
    ],
    ids=[
        "idle",
        "idle, flag",
        "busy",
        "busy, whose own abort would wait for a second",
        "the same, and a request comes late",
        "busy, flag",
        "busy, in place",
        "a request slips in",
        "a request slips in, and an engine that is paused ends no request",
    ],
)
async def test_pause(engine: Engine, flag: str | None, expected: list[str]) -> None:
    await UpdateWindow("0.1", True, False, flag, 60.0).pause_and_flush(engine)  # type: ignore[arg-type]
    assert engine.asked == expected


async def test_an_adapter_is_replaced_only_after_requests_that_are_not_counted_yet() -> None:
    """A request that SGLang still tokenizes holds its adapter, and does not run or wait yet. With
    ``in_place`` it would hold it until the update ends, and the update would wait for it."""
    engine: Any = Engine()
    await UpdateWindow("0.1", True, False, "abort", 60.0, ends_requests=True).pause_and_flush(
        engine
    )
    assert engine.asked == ["abort", "flush"]


@pytest.mark.parametrize("adapter_only", [True, False])
@pytest.mark.parametrize("keys", [True, False])
async def test_the_cache_is_kept_if_only_an_adapter_changes(adapter_only: bool, keys: bool) -> None:
    """SGLang gives each load of an adapter a new id, so that no request finds the KV cache of an
    older version. With any other engine or update, the cache would be that of old weights."""
    engine: Any = Engine(adapter_cache_keys=keys)
    window = UpdateWindow("0.1", False, False, "abort", 60.0, ends_requests=True)
    assert await window.open([engine], adapter_only) == [engine]
    await window.close(SendResult())
    kept = adapter_only and keys
    assert engine.asked == [
        "abort",
        *([] if kept else ["flush"]),
        f"continue, empty {not adapter_only}",
    ]


async def test_a_mode_that_the_engine_cannot_use_is_refused() -> None:
    engine: Any = Engine(running=2, retract=False)
    with pytest.raises(EngineError, match="--update-weight-pause-mode abort"):
        await UpdateWindow("0.1", True, False, "retract", 60.0).pause_and_flush(engine)


async def test_requests_go_on_in_place_only_where_their_tokens_name_their_weights() -> None:
    engine: Any = Engine(running=2, version_spans=False)
    with pytest.raises(EngineError, match="--update-weight-pause-mode abort"):
        await UpdateWindow("0.1", True, False, "in_place", 60.0).pause_and_flush(engine)
    assert engine.asked == []


def test_no_garbage_is_collected_while_engines_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection in a trainer with compiled layers takes longer than engines pause for an
    adapter.
    """
    enabled: list[bool] = []

    def run(sender: object, named_weights: object) -> None:
        enabled.append(gc.isenabled())
        raise RuntimeError("lost")

    monkeypatch.setattr("slime.weights.sync.Sender.run", run)
    monkeypatch.setattr("slime.weights.sync.Sender.__init__", lambda *_: None)
    with pytest.raises(RuntimeError):
        sync_weights(None, [], [], object(), "1.0", is_sender=True)  # type: ignore[arg-type]
    assert enabled == [False] and gc.isenabled()
