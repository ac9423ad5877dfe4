"""The jobs of ``slime launch``: what the file may say, what is written, and the batch script under
scripted commands of Slurm.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from slime.cli.main import main
from slime.plugins.launch.jobs import flag_words

JOB: dict[str, object] = {
    "name": "trial",
    "nodes": 2,
    "gpus_per_node": 8,
    "hours": 1.5,
    "image": "registry.example/slime:1",
    "env": {"NCCL_SOCKET_IFNAME": "eth0"},
    "mounts": {"/shared": "claim"},
    "slurm": ["--partition=gpu"],
}


def write(folder: Path, job: dict[str, object] | None = None, **run: object) -> Path:
    file = folder / "run.yaml"
    flags = {"save": str(folder / "saved"), "colocate": True, "lr": 1e-6, **run}
    content = {"job": {**JOB, "workdir": str(folder), **(job or {})}, "run": flags}
    file.write_text(yaml.safe_dump(content))
    return file


def launch(where: str, file: Path, *more: str) -> str:
    assert main(["launch", where, str(file), *more]) == 0
    return next(
        file.with_suffix(suffix).read_text()
        for suffix in (".sbatch", ".k8s.yaml", ".sky.yaml")
        if file.with_suffix(suffix).exists()
    )


def test_flags_are_words_of_a_command_line() -> None:
    assert flag_words({"a_b": True, "c": False, "d": [1, "x"], "e": 0.5}) == (
        ["--a-b", "--no-c", "--d", "1", "x", "--e", "0.5"]
    )


@pytest.mark.parametrize(
    ("job", "run", "told"),
    [
        ({"nodes": 0}, {}, "job.nodes"),
        ({"node": 2}, {}, "node"),
        ({"workdir": "relative"}, {}, "job.workdir"),
        ({"name": "Has Spaces"}, {}, "job.name"),
        ({}, {"colocat": True}, "--colocate"),
        ({}, {"lr": "fast"}, "--lr"),
        ({}, {"save": "/a b"}, "run.save"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    job: dict[str, object],
    run: dict[str, object],
    told: str,
) -> None:
    assert main(["launch", "slurm", str(write(tmp_path, job, **run))]) == 1
    assert told in capsys.readouterr().err
    assert list(tmp_path.glob("*.sbatch")) == []


def test_the_rayjob_has_all_nodes_gpus_and_volumes(tmp_path: Path) -> None:
    manifest = yaml.safe_load(launch("k8s", write(tmp_path)))
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    spec = manifest["spec"]
    cluster = spec["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == 1 and spec["activeDeadlineSeconds"] == 5400
    for group in (cluster["headGroupSpec"], workers):
        assert group["rayStartParams"] == {"num-gpus": "8"}
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
        assert {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"} in container["env"]
        named = {volume["name"] for volume in pod["volumes"]}
        assert named == {mount["name"] for mount in container["volumeMounts"]}
        assert {"claimName": "claim"} in [v.get("persistentVolumeClaim") for v in pod["volumes"]]
    one = yaml.safe_load(launch("k8s", write(tmp_path, {"nodes": 1})))
    assert "workerGroupSpecs" not in one["spec"]["rayClusterSpec"]
    assert main(["launch", "k8s", str(write(tmp_path, {"image": ""}))]) == 1


def test_the_task_of_skypilot_has_nodes_and_gpus(tmp_path: Path) -> None:
    task = yaml.safe_load(launch("skypilot", write(tmp_path, {"gpu": "H200"})))
    assert task["num_nodes"] == 2
    assert task["resources"] == {
        "accelerators": "H200:8",
        "image_id": "docker:registry.example/slime:1",
    }
    assert subprocess.run(["bash", "-n"], input=task["run"], text=True).returncode == 0


def test_submit_names_a_program_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", "slurm", str(write(tmp_path)), "--submit"]) == 1
    assert "sbatch" in capsys.readouterr().err


# --- the batch script, under commands that a Slurm cluster would have ----------------------------

COMMANDS = {
    "scontrol": """
case "$1" in
    show) printf 'node-a\\nnode-b\\n' ;;
    requeue) echo "$2" >>"$LOG/requeued" ;;
esac
""",
    "srun": """
for word in "$@"; do case "$word" in --nodelist=*) export NODE="${word#*=}" ;; esac; done
while [[ "$1" == --* ]]; do shift; done
exec "$@"
""",
    "hostname": "echo 10.0.0.1 10.0.0.2",
    "ray": """
echo "$NODE $RAY_AUTH_TOKEN $*" >>"$LOG/ray"
exec sleep 60
""",
    # A run that trains until it is told to stop and then saves, or ends if it goes on from a snapshot.
    "python": """
echo "$*" >>"$LOG/python"
case "$*" in
    *wait_for_nodes*) exit 0 ;;
    *--load*) exit "${SECOND:-0}" ;;
esac
trap 'sleep 0.3; mkdir -p "$SAVED"; echo 3 >"$SAVED/latest_checkpointed_iteration.txt"; exit 143' TERM
touch "$LOG/trains"
while :; do sleep 0.05; done
""",
}


def start_job(folder: Path, **variables: str) -> subprocess.Popen[bytes]:
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name, body in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}")
        (commands / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "LOG": str(folder),
        "SAVED": str(folder / "saved"),
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_ID": "17",
        **variables,
    }
    return subprocess.Popen(
        ["bash", str(folder / "run.sbatch")], env=environment, start_new_session=True
    )


def end(job: subprocess.Popen[bytes]) -> int:
    """The status of a job; what its nodes still run ends with it, as Slurm does."""
    try:
        return job.wait(60)
    finally:
        os.killpg(job.pid, signal.SIGKILL)


@pytest.mark.real
@pytest.mark.skipif(sys.platform != "linux", reason="Slurm's script needs bash 4")
def test_a_job_that_is_stopped_saves_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    script = launch("slurm", write(tmp_path))
    header = [line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH" in line]
    assert {"--nodes=2", "--gpus-per-node=8", "--time=90", "--partition=gpu", "--requeue"} <= set(
        header
    )
    job = start_job(tmp_path)
    until = time.monotonic() + 60
    while not (tmp_path / "trains").exists():
        assert job.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    os.kill(job.pid, signal.SIGTERM)  # to the batch shell alone, as --signal=B:TERM does
    assert end(job) == 143
    assert (tmp_path / "requeued").read_text().split() == ["17"]
    nodes = [line.split() for line in (tmp_path / "ray").read_text().splitlines()]
    assert sorted(line[0] for line in nodes) == ["node-a", "node-b"]
    assert len({line[1] for line in nodes}) == 1 and len(nodes[0][1]) == 64
    assert {line[0]: "--head" in line for line in nodes} == {"node-a": True, "node-b": False}
    waited, trained = (tmp_path / "python").read_text().splitlines()
    assert waited.split()[-1] == "2" and "--load" not in trained

    assert end(start_job(tmp_path)) == 0
    again = (tmp_path / "python").read_text().splitlines()[-1].split()
    assert again[again.index("--load") + 1] == str(tmp_path / "saved")
    assert (tmp_path / "requeued").read_text().split() == ["17"]


@pytest.mark.real
@pytest.mark.skipif(sys.platform != "linux", reason="Slurm's script needs bash 4")
def test_a_job_whose_run_fails_is_not_queued_again(tmp_path: Path) -> None:
    launch("slurm", write(tmp_path))
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("3")
    assert end(start_job(tmp_path, SECOND="1")) == 1
    assert not (tmp_path / "requeued").exists()
