"""An engine that is to draw with top-p and top-k before it joins does so, or says why not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.config.args import Args
from slime.engines.launch import EngineSettings, EngineSpec
from slime.engines.process import ServerFailed, free_port
from slime.plugins.sglang.launch import SglangProcess, needs_sampler_warmup

SERVER = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        print("asked to draw", flush=True)
        self.answer(int(sys.argv[2]))

    def answer(self, status):
        self.send_response(status)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""A server that is healthy, and that answers a request to draw with a status."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[bool, int], SglangProcess]]:
    started: list[SglangProcess] = []

    def start(warms: bool, status: int) -> SglangProcess:
        port = free_port()
        command = [sys.executable, "-c", SERVER, str(port), str(status)]
        log = tmp_path / "engine.log"
        server = SglangProcess("engine", command, f"http://127.0.0.1:{port}", log, {})
        server.warms_up_sampler = warms
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.mark.parametrize("warms", [False, True])
def test_it_is_ready_when_it_has_drawn(
    start: Callable[[bool, int], SglangProcess], warms: bool
) -> None:
    server = start(warms, 200)
    server.wait_ready(60.0)
    assert ("asked to draw" in server.log_tail()) is warms


def test_a_failure_comes_with_the_servers_last_words(
    start: Callable[[bool, int], SglangProcess],
) -> None:
    with pytest.raises(ServerFailed, match=r"(?s)500.*asked to draw"):
        start(True, 500).wait_ready(60.0)


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
    ],
)
def test_an_engine_draws_early_if_its_sampler_has_kernels_to_compile(
    changes: dict[str, Any], expected: bool
) -> None:
    """With flashinfer also at plain temperature 1: the greedy health check that meets its requests
    needs the kernel.
    """
    assert needs_sampler_warmup(settings(**changes), EngineSpec(0, "/m")) is expected


def test_a_group_of_servers_can_have_another_sampler() -> None:
    spec = EngineSpec(0, "/m", options={"sampling_backend": "flashinfer"})
    assert needs_sampler_warmup(settings(), spec)


@pytest.mark.parametrize(
    "other", [{"updates": False}, {"worker_type": "prefill"}, {"worker_type": "decode"}]
)
def test_of_the_model_that_learns_whole_servers_are_asked(other: dict[str, Any]) -> None:
    assert not needs_sampler_warmup(settings(eval_top_p=0.9), EngineSpec(0, "/m", **other))
