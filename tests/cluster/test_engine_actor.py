"""Which engines draw with top-p and top-k once before they join."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import slime.cluster.engine_actor as module
from slime.engines.plan import EngineSpec


@pytest.mark.parametrize(
    ("changes", "spec", "rank", "expected"),
    [
        ({}, {}, 0, ["http://engine"]),
        ({"rollout_top_p": 1.0}, {}, 0, []),
        ({"rollout_backend": "embedded"}, {}, 0, []),
        ({}, {"worker_type": "prefill"}, 0, []),
        ({}, {}, 1, []),  # another node's part of a server answers nobody
    ],
)
def test_a_whole_sglang_server_does_where_the_run_will(
    changes: dict[str, Any],
    spec: dict[str, Any],
    rank: int,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    waited, warmed = [], []
    server = SimpleNamespace(url="http://engine", wait_ready=waited.append)
    monkeypatch.setattr(module, "_host", lambda: "127.0.0.1")
    monkeypatch.setattr("slime.cluster.logs.redirect_output", lambda *_: None)
    monkeypatch.setattr("slime.engines.launch.start_engine", lambda *_: server)
    monkeypatch.setattr("slime.engines.sglang.sampler.warm_up", lambda url, seconds: warmed.append((url, seconds)))
    settings = {"rollout_backend": "sglang", "rollout_temperature": 1.0, "rollout_top_p": 0.9, "rollout_top_k": -1}
    args: Any = SimpleNamespace(**{"start_timeout": 50.0, **settings, **changes})
    actor = module.EngineActor(args, EngineSpec(0, "/m", **spec), str(tmp_path), None, (rank, 2, None))
    assert actor.wait_ready() == "http://engine" and waited == [50.0]
    assert [url for url, _ in warmed] == expected
    assert all(0 < seconds <= 50 for _, seconds in warmed), "start and warm-up share one deadline"
