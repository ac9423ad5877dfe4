"""Dumps of PyTorch's flight recorder: the rank that is behind is named, and no code of a dump
runs.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from slime.cli.main import main
from slime.observability.run_state import RunState
from slime.plugins.tools.doctor.facts import Facts, Finding, read_facts
from slime.plugins.tools.doctor.flight import collectives, read_recordings

RANK = """
import os, pickle, sys, time, torch, torch.distributed as dist
import torch._C._distributed_c10d as c10d
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
end = time.monotonic() + 60  # its end is recorded by another thread
while pickle.loads(c10d._dump_fr_trace())["entries"][0]["state"] != "completed" and time.monotonic() < end:
    time.sleep(0.01)
if rank == 0:  # rank 1 never comes
    work = dist.all_reduce(torch.ones(1000), async_op=True)
with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + str(rank), "wb") as file:
    file.write(c10d._dump_fr_trace())
os._exit(0)
"""


def entry(
    number: int, done: bool = True, what: str = "nccl:all_reduce", size: int = 4
) -> dict[str, object]:
    """An operation in the shape of PyTorch's dumps (version 2.10)."""
    return {
        "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": number,
        "p2p_seq_id": 0, "op_id": number, "profiling_name": what, "input_sizes": [[size]], "is_p2p": False,
        "state": "completed" if done else "started", "retired": done,
        "frames": [
            {"name": "all_reduce", "filename": "/x/torch/distributed/c10d.py", "line": 1},
            {"name": "train", "filename": "/home/me/loop.py", "line": 12},
        ],
    }  # fmt: skip


def plant(
    folder: Path, ranks: dict[int, list[dict[str, object]]], world: int = 2
) -> Finding | None:
    """Write the dumps of the ranks, and return the finding for a run that failed."""
    (folder / "logs").mkdir(exist_ok=True)
    members = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))}}
    for rank, entries in ranks.items():
        dump = {"version": "2.10", "pg_config": members, "pg_status": {}, "entries": entries}
        (folder / "logs" / f"flight_recorder_actor_rank_{rank}").write_bytes(pickle.dumps(dump))
    return next(collectives(failed(folder)), None)


def failed(folder: Path, *steps: dict[str, float | None], status: str = "failed") -> Facts:
    state = RunState(status, 1, "host", "train", 0.0)  # type: ignore[arg-type]
    return Facts(folder, steps=steps, state=state, processes=[])


def test_the_rank_that_is_behind_is_named_with_the_operation(tmp_path: Path) -> None:
    found = plant(tmp_path, {0: [entry(1), entry(2, done=False)], 1: [entry(1)]})
    assert found is not None and found.kind == "rank_behind"
    assert found.title == (
        "Rank 1 of the actor did not begin operation 2 (nccl:all_reduce) of process group 0, for "
        "which rank 0 waits."
    )  # fmt: skip
    assert found.evidence[0].endswith(
        "last 2 nccl:all_reduce [4], not done, /home/me/loop.py:12, in train"
    )


def test_ranks_that_call_different_operations(tmp_path: Path) -> None:
    found = plant(
        tmp_path, {0: [entry(1, done=False)], 1: [entry(1, done=False, what="nccl:broadcast")]}
    )
    assert (
        found is not None
        and found.kind == "collective_mismatch"
        and "nccl:broadcast" in found.evidence[1]
    )
    found = plant(tmp_path, {0: [entry(1, done=False)], 1: [entry(1, done=False, size=5)]})
    assert found is not None and found.kind == "collective_mismatch", (
        "the same operation of other sizes"
    )


def test_a_rank_without_a_record_and_ranks_that_all_wait(tmp_path: Path) -> None:
    both = {rank: [entry(1, done=False)] for rank in (0, 1)}
    found = plant(tmp_path, both, world=3)
    assert found is not None and found.kind == "rank_silent" and found.title.startswith("Rank 2 ")
    found = plant(tmp_path, both)
    assert found is not None and found.kind == "collective_stuck"


def test_no_alarm_where_all_is_done_or_the_run_went_on(tmp_path: Path) -> None:
    assert plant(tmp_path, {0: [entry(1)], 1: [entry(1)]}) is None
    assert plant(tmp_path, {0: [entry(1), entry(2, done=False)], 1: [entry(1)]}) is not None
    assert list(collectives(failed(tmp_path, {"time": time.time() + 60}))) == [], (
        "a step was trained after the dump"
    )
    assert list(collectives(failed(tmp_path, status="completed"))) == []


@pytest.mark.parametrize("linked", ["driver.log", "folder", "dump"])
def test_links_out_of_the_folder_are_not_followed(
    linked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        folder.mkdir()
        state = RunState("failed", 1, "elsewhere", "train", 0.0)
        (folder / "state.json").write_text(json.dumps(asdict(state)))
        (folder / "config.yaml").write_text("{}\n")
    secret = entry(2, False)
    secret["profiling_name"] = "token-of-mine"
    plant(other, {0: [entry(1), secret], 1: [entry(1)]})
    (other / "logs" / "driver.log").write_text("token-of-mine\n")
    if linked == "folder":
        (run / "logs").symlink_to(other / "logs")
    else:
        (run / "logs").mkdir()
        for path in (other / "logs").iterdir():
            if ("flight" in path.name) == (linked == "dump"):
                (run / "logs" / path.name).symlink_to(path)
    (run / "logs" / "within.log").write_text("x\n")
    (run / "logs" / "kept.log").symlink_to(run / "logs" / "within.log")
    facts = read_facts(run)
    assert (
        "driver.log" not in facts.logs
        and facts.outside == {"driver.log": 1, "dump": 2, "folder": 5}[linked]
    )
    assert (set(facts.logs) == {"kept.log", "within.log"}) is (linked != "folder")
    main(["doctor", str(run)])
    page = capsys.readouterr().out
    assert "token-of-mine" not in page and f"{facts.outside} log(s) outside" in page


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "state.json"])
def test_files_of_a_run_that_lead_out_of_it_are_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("{}\n")
    (tmp_path / "mine").write_text("token-of-mine: [")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "mine")
    assert main(["doctor", str(run)]) == 1
    told = capsys.readouterr()
    assert f"{name} leads out" in told.err and "token" not in told.err + told.out


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}\n")
    (tmp_path / "logs").mkdir()
    for name in ("driver.log", "flight_recorder_actor_rank_0"):
        os.mkfifo(tmp_path / "logs" / name)
    assert read_facts(tmp_path).logs.get("driver.log", "") == ""
    assert read_recordings(tmp_path / "logs") == {}


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("made_by_the_dump",)


def test_a_dump_runs_no_code_and_a_broken_one_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "0": pickle.dumps({"entries": [], "x": Payload()}),
        "1": pickle.dumps({"entries": [entry(1)]})[:-40],
    }
    for rank, content in files.items():
        (tmp_path / f"flight_recorder_actor_rank_{rank}").write_bytes(content)
    assert read_recordings(tmp_path) == {} and not (tmp_path / "made_by_the_dump").exists()


@pytest.mark.real
@pytest.mark.long
def test_dumps_that_pytorch_has_written(tmp_path: Path) -> None:
    """Two real ranks; the second one leaves before an operation for which the first one waits."""
    (tmp_path / "logs").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    address["TORCH_FR_DUMP_TEMP_FILE"] = str(tmp_path / "logs" / "flight_recorder_actor_rank_")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK], env={**os.environ, **address, "RANK": str(rank)}
        )
        for rank in (0, 1)
    ]
    try:
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    found = next(collectives(failed(tmp_path)), None)
    assert found is not None and found.kind == "rank_behind"
    assert "operation 2 (gloo:all_reduce)" in found.title
