"""What Prometheus reads from a run."""

from __future__ import annotations

import math
import socket
import urllib.request
from pathlib import Path

import pytest
from make_args import make_args

from slime.observability.run_state import StateFile
from slime.observability.trackers import Trackers

pytest.importorskip("prometheus_client")


def read(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.2:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in lines
        if not line.startswith("#")
    }


def test_the_newest_numbers_and_the_phase_are_served_until_the_run_ends(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    state = StateFile(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        port = free.getsockname()[1]
    flags = {"tracker": ["prometheus"], "metrics_port": port, "metrics_host": "127.0.0.2"}
    trackers = Trackers(make_args(**flags), folder, None)
    state.enter("rollout")
    for step in (0, 1):
        trackers.log({"perf/step_time": 2.0 + step, "rollout/pass@4": 0.5}, step, "rollout/step")
    trackers.log({"train/loss": float("nan")}, 1, "train/step")
    numbers = read(port)
    assert numbers['slime_perf_step_time{run="one"}'] == 3.0
    assert numbers['slime_rollout_pass_4{run="one"}'] == 0.5
    assert numbers['slime_step{kind="rollout",run="one"}'] == 1
    assert numbers['slime_phase{phase="rollout",run="one"}'] == 1
    assert 0 <= numbers['slime_phase_seconds{run="one"}'] < 60
    assert math.isnan(numbers['slime_train_loss{run="one"}'])
    state.enter("train")
    assert 'slime_phase{phase="train",run="one"}' in read(port)
    trackers.close()
    with pytest.raises(OSError):
        read(port)
