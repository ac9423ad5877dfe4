"""The load of engines is measured without disturbing them, and the file of it stays small."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from slime.cluster.engine import Engine
from slime.engines.launch import EngineSpec
from slime.engines.process import free_port
from slime.plugins.tools import engine_loads
from slime.plugins.tools.engine_loads import EngineLoads


class Answers(BaseHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        ranks = [
            {"num_running_reqs": 2, "num_waiting_reqs": 1, "num_used_tokens": 30}
        ] * 2  # of two data-parallel ranks
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"loads": ranks}).encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    Answers.asked = []
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def engines(url: str) -> list[Engine]:
    silent = f"http://127.0.0.1:{free_port()}"
    return [
        Engine(EngineSpec(0, ""), url, "serving", external=True),
        Engine(EngineSpec(1, ""), silent, "serving", external=True),
        Engine(EngineSpec(2, ""), url, "lost", external=True),
    ]


def rows(path: Path) -> list[list[list[object]]]:
    return [json.loads(line)["engines"] for line in path.read_text().splitlines()]


def test_each_engine_with_its_state_and_numbers(url: str, tmp_path: Path) -> None:
    loads = EngineLoads(engines(url), lambda: False, tmp_path / "engines.jsonl")
    loads.measure()
    loads.stop()
    nothing = [None, None, None]
    assert rows(tmp_path / "engines.jsonl") == [
        [[0, "serving", 4, 2, 60], [1, "silent", *nothing], [2, "lost", *nothing]]
    ]
    kept = loads.between(0.0, float("inf"))
    assert [(one["engine"], one["running"]) for one in kept] == [(0, 4), (1, None), (2, None)]
    assert loads.between(0.0, kept[0]["time"] - 1) == []


def test_engines_are_not_asked_during_a_pause(url: str, tmp_path: Path) -> None:
    loads = EngineLoads(engines(url)[:1], lambda: True, tmp_path / "engines.jsonl")
    loads.measure()
    loads.stop()
    assert (
        rows(tmp_path / "engines.jsonl") == [[[0, "paused", None, None, None]]]
        and Answers.asked == []
    )


def test_lines_become_rarer_with_the_age_of_the_run(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(engine_loads.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(engine_loads, "load_of", lambda engine, paused, moment: {
        "time": moment, "engine": engine.index, "state": "serving", "running": 1, "waiting": 0, "tokens": 1,
    })  # fmt: skip
    loads = EngineLoads(engines(url), lambda: False, tmp_path / "engines.jsonl")

    def lines_of(ages: range) -> int:
        before = len((tmp_path / "engines.jsonl").read_text().splitlines())
        for clock[0] in ages:
            loads.measure()
        return len(rows(tmp_path / "engines.jsonl")) - before

    assert lines_of(range(0, 100_000, 20)) == 5_000, "at an age of 100,000 s, one in 20 s is due"
    assert lines_of(range(10_000_000, 10_020_000, 20)) <= 20_000 / 2_000 + 1
    loads.stop()


def test_large_fleets_are_asked_less_often(url: str, tmp_path: Path) -> None:
    loads = EngineLoads(engines(url)[:1] * 320, lambda: False, tmp_path / "engines.jsonl")
    assert loads.seconds == 10.0
    loads.stop()
