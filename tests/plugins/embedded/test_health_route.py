"""What the embedded engine says of its health while a step takes long."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from slime.plugins.embedded import attention, routes_generate
from slime.plugins.embedded.served import SERVED


class BusyEngine:
    """Its thread computes one long step, so it takes no commands."""

    failure = None
    resting = False
    last_step = 0.0

    async def call(self, function: Any) -> Any:
        await asyncio.Event().wait()


@pytest.mark.parametrize(("layers", "status"), [(True, 200), (False, 503)])
async def test_a_long_prefill_is_no_hang(
    monkeypatch: pytest.MonkeyPatch, layers: bool, status: int
) -> None:
    """As long as layers are computed the engine is well; when nothing is, it hangs."""
    monkeypatch.setattr(routes_generate, "HEALTH_SECONDS", 0.05)
    monkeypatch.setattr(attention, "progressed_at", lambda: time.monotonic() if layers else 0.0)
    request: Any = SimpleNamespace(app={SERVED: SimpleNamespace(engine=BusyEngine())})
    assert (await routes_generate.health_generate(request)).status == status


def test_each_layer_that_is_begun_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.monotonic()
    nothing: Any = None
    with pytest.raises(RuntimeError, match="engine step"):
        attention.slots_attention(nothing, nothing, nothing, nothing, None)
    assert attention.progressed_at() >= before
