"""The batch script of ``slime launch slurm`` with real Ray and a real run on two "nodes" of this
machine, 127.0.0.2 and 127.0.0.3: told to stop, it saves and is queued again; started again, it ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slime.cli.main import main

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="two loopback addresses"),
]

COMMANDS = {
    "scontrol": 'if [ "$1" = show ]; then printf "a\\nb\\n"; else echo "$2" >>"$HERE/requeued"; fi',
    "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "hostname": "echo 127.0.0.2",
    "python": f'exec {sys.executable} "$@"',
    "ray": f"""
case "$*" in
    *--head*) more=(--include-dashboard false --temp-dir "$SESSION") ;;
    *) more=(--node-ip-address 127.0.0.3) ;;
esac
exec {sys.executable} -m ray.scripts.scripts "$@" --num-cpus 2 --object-store-memory 200000000 "${{more[@]}}"
""",
}


def mapping(words: list[object]) -> dict[str, object]:
    flags: dict[str, object] = {}
    for word in words:
        if str(word).startswith("--"):
            flags[name := str(word)[2:]] = True
        else:
            flags[name] = str(word)
    return flags


def test_a_run_on_two_nodes_is_stopped_queued_again_and_ends(
    runner, flags, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, body in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o755)
    job = {"name": "two", "nodes": 2, "gpus_per_node": 0, "hours": 1, "workdir": str(tmp_path)}
    run = {
        **mapping(flags),
        "save": str(tmp_path / "saved"),
        "run-name": "run",
        "num-rollout": 6,
        "actor-num-nodes": 2,
        "actor-num-gpus-per-node": 1,
        "rollout-num-gpus": 1,
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"job": job, "run": run}))
    assert main(["launch", "slurm", str(file)]) == 0

    def start() -> subprocess.Popen[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.2", 0))
            port = free.getsockname()[1]
        variables = {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "HERE": str(tmp_path),
            "SESSION": str(tmp_path_factory.mktemp("r")),
            "RAY_PORT": str(port),
            "SLURM_JOB_NODELIST": "[a-b]",
            "SLURM_JOB_ID": "5",
            "GLOO_SOCKET_IFNAME": "lo",
            "RAY_enable_open_telemetry": "0",
            # This process may have 0, with which slime keeps its own clusters on loopback.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
        }
        return runner.spawn(["bash", str(tmp_path / "run.sbatch")], variables)

    def end(job: subprocess.Popen[str]) -> int:
        status = job.wait(300)
        runner.stop()  # Ray's nodes, as Slurm ends what a job leaves
        return status

    first = start()
    metrics = tmp_path / "outputs" / "run" / "metrics.jsonl"
    runner.wait_until(first, lambda: metrics.exists() and metrics.stat().st_size)
    first.send_signal(signal.SIGTERM)
    assert end(first) == 143
    assert (tmp_path / "requeued").read_text().split() == ["5"]
    saved = tmp_path / "saved" / "latest_checkpointed_iteration.txt"
    assert 0 <= int(saved.read_text()) < 5
    second = start()
    assert end(second) == 0
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["rollout/step"] for row in rows if "rollout/step" in row] == [0, 1, 2, 3, 4, 5]
    assert (tmp_path / "requeued").read_text().split() == ["5"]
