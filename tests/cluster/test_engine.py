"""An engine that is to draw with top-p and top-k before it joins does so, or says why not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import slime.cluster.engine_calls as module
from slime.config.args import Args
from slime.engines.launch import EngineSettings, EngineSpec
from slime.engines.process import ServerFailed


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What ``start_engine`` gives; ``waited`` and ``warmed`` are the seconds of each call."""
    server = SimpleNamespace(
        url="http://engine", waited=[], warmed=[], fails=False, log_tail=lambda: "no nvcc"
    )
    server.wait_ready = server.waited.append

    def warm_up(url: str, seconds: float) -> None:
        assert url == server.url
        server.warmed.append(seconds)
        if server.fails:
            raise ServerFailed("it did not answer")

    monkeypatch.setattr(
        module, "door", lambda: SimpleNamespace(address=lambda: "127.0.0.1", log_to=lambda *_: None)
    )
    monkeypatch.setattr("slime.engines.launch.start_engine", lambda *_: server)
    monkeypatch.setattr("slime.engines.sglang.launch.warm_up", warm_up)
    return server


def actor(tmp_path: Path, warms: bool) -> module.EngineActor:
    return module.EngineActor(
        EngineSettings("/m"), 50.0, EngineSpec(0, "/m"), str(tmp_path), warms_up_sampler=warms
    )


@pytest.mark.parametrize("warms", [False, True])
def test_it_is_ready_when_it_has_drawn(
    server: SimpleNamespace, tmp_path: Path, warms: bool
) -> None:
    assert actor(tmp_path, warms).wait_ready() == server.url
    assert server.waited == [50.0] and len(server.warmed) == warms
    assert all(0 < seconds <= 50 for seconds in server.warmed), "both share one deadline"


def test_a_failure_comes_with_the_servers_last_words(
    server: SimpleNamespace, tmp_path: Path
) -> None:
    server.fails = True
    with pytest.raises(ServerFailed, match="it did not answer\nno nvcc"):
        actor(tmp_path, True).wait_ready()


def args(**changes: Any) -> Any:
    settings = {
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_backend": "sglang",
    }
    return Args(hf_checkpoint="/m", **{**settings, **changes})


def settings(**changes: Any) -> EngineSettings:
    return EngineSettings.from_args(args(**changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sglang": {"sampling_backend": "flashinfer"}}, True),
        ({"eval_top_p": 0.9}, True),
        ({"eval_config": "sets.yaml"}, True),  # its sets may ask for top-p
        ({}, False),
        ({"eval_top_k": -1, "eval_temperature": 0.0}, False),
        ({"eval_top_p": 0.9, "sglang": {"sampling_backend": "pytorch"}}, False),
        ({"eval_top_p": 0.9, "rollout_backend": "embedded"}, False),
    ],
)
def test_an_engine_draws_early_if_its_sampler_has_kernels_to_compile(
    changes: dict[str, Any], expected: bool
) -> None:
    """With flashinfer also at plain temperature 1: the greedy health check that meets its requests
    needs the kernel.
    """
    assert module.needs_sampler_warmup(settings(**changes), EngineSpec(0, "/m")) is expected


def test_a_group_of_servers_can_have_another_sampler() -> None:
    spec = EngineSpec(0, "/m", options={"sampling_backend": "flashinfer"})
    assert module.needs_sampler_warmup(settings(), spec)


@pytest.mark.parametrize(
    "other", [{"updates": False}, {"worker_type": "prefill"}, {"worker_type": "decode"}]
)
def test_of_the_model_that_learns_whole_servers_are_asked(other: dict[str, Any]) -> None:
    assert not module.needs_sampler_warmup(settings(eval_top_p=0.9), EngineSpec(0, "/m", **other))


def test_of_a_server_that_spans_nodes_the_one_that_answers_draws(
    server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[module.EngineActor] = []
    here = SimpleNamespace(
        create=lambda cls, *values, **_: started.append(cls(*values)),
        address=lambda: "127.0.0.1",
        log_to=lambda *_: None,
    )
    monkeypatch.setattr(module, "door", lambda: here)
    placement: Any = SimpleNamespace(
        engine_nodes=lambda *_: [(0, "10.0.0.1", [0]), (1, "10.0.0.2", [0])],
        engine_options=lambda _: {},
    )
    specs = [EngineSpec(0, "/m", num_gpus=2)]
    module.launcher(settings(eval_top_p=0.9), 50.0, specs, placement, tmp_path, {})(0)
    assert [actor.warms_up_sampler for actor in started] == [True, False]
