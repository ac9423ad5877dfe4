"""An engine that is to draw with top-p and top-k before it joins does so, or says why not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import slime.cluster.engine_actor as module
from slime.engines.plan import EngineSpec
from slime.engines.process import ServerFailed


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What ``start_engine`` gives; ``waited`` and ``warmed`` are the seconds of each call."""
    server = SimpleNamespace(url="http://engine", waited=[], warmed=[], fails=False, log_tail=lambda: "no nvcc")
    server.wait_ready = server.waited.append

    def warm_up(url: str, seconds: float) -> None:
        assert url == server.url
        server.warmed.append(seconds)
        if server.fails:
            raise ServerFailed("it did not answer")

    monkeypatch.setattr(module, "_host", lambda: "127.0.0.1")
    monkeypatch.setattr("slime.cluster.logs.redirect_output", lambda *_: None)
    monkeypatch.setattr("slime.engines.launch.start_engine", lambda *_: server)
    monkeypatch.setattr("slime.engines.sglang.sampler.warm_up", warm_up)
    return server


def actor(tmp_path: Path, warms: bool) -> module.EngineActor:
    args: Any = SimpleNamespace(start_timeout=50.0)
    return module.EngineActor(args, EngineSpec(0, "/m"), str(tmp_path), warms_sampler=warms)


@pytest.mark.parametrize("warms", [False, True])
def test_it_is_ready_when_it_has_drawn(server: SimpleNamespace, tmp_path: Path, warms: bool) -> None:
    assert actor(tmp_path, warms).wait_ready() == server.url
    assert server.waited == [50.0] and len(server.warmed) == warms
    assert all(0 < seconds <= 50 for seconds in server.warmed), "both share one deadline"


def test_a_failure_comes_with_the_servers_last_words(server: SimpleNamespace, tmp_path: Path) -> None:
    server.fails = True
    with pytest.raises(ServerFailed, match="it did not answer\nno nvcc"):
        actor(tmp_path, True).wait_ready()
