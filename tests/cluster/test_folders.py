"""Two runs that would write to one folder: the second one is refused before it touches anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from make_args import make_args

from slime.cluster.folders import RUN_LOCKS, SAVE_LOCK, FolderInUse, lock_run, lock_save
from slime.cluster.start import Parts, prepare
from slime.config.args import Args

HOLDS = """
import sys
from slime.cluster.folders import lock_save
lock = lock_save(sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""


def args_of(folder: Path, name: str = "run", save: Path | None = None) -> Args:
    return make_args(output_dir=str(folder), run_name=name, save=str(save) if save else None)


def end(parts: Parts) -> None:
    for lock in parts.locks:
        lock.release()


def test_a_run_of_the_same_name_is_refused_while_the_first_goes_on(tmp_path: Path) -> None:
    first = prepare(args_of(tmp_path))
    first.dir.metrics.write_text("{}\n")
    with pytest.raises(FolderInUse, match="--run-name"):
        prepare(args_of(tmp_path))
    assert first.dir.metrics.is_file() and not (tmp_path / "run.1").exists(), (
        "it was not moved aside"
    )
    end(prepare(args_of(tmp_path, "other")))
    end(first)
    end(prepare(args_of(tmp_path)))
    assert (tmp_path / "run.1" / "metrics.jsonl").is_file(), "it has ended, so it makes room"


def test_two_runs_never_save_to_one_folder(tmp_path: Path) -> None:
    save = tmp_path / "first" / "checkpoints"
    first = prepare(args_of(tmp_path, "first", save))
    with pytest.raises(FolderInUse, match=f"--save {save}"):
        prepare(args_of(tmp_path, "second", save))
    end(first)
    end(prepare(args_of(tmp_path, "second", save)))


def test_a_killed_run_can_be_resumed_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        with pytest.raises(FolderInUse, match=f"process {process.pid} on"):
            prepare(args_of(tmp_path / "outputs", "resumed", tmp_path))
        process.kill()
        process.wait()
        end(prepare(args_of(tmp_path / "outputs", "resumed", tmp_path)))


@pytest.mark.parametrize(
    "kind", ["link", "dangling", "hard link", "pipe", "device", "folder", "other file"]
)
@pytest.mark.parametrize("of_save", [True, False], ids=["save", "run"])
def test_a_lock_never_leads_to_another_file(tmp_path: Path, kind: str, of_save: bool) -> None:
    victim = tmp_path / "authorized_keys"
    victim.write_text("ssh-ed25519 mine")
    folder = tmp_path / "folder"
    lock = folder / SAVE_LOCK if of_save else folder / RUN_LOCKS / "name"
    lock.parent.mkdir(parents=True)
    if kind in ("link", "dangling", "device"):
        lock.symlink_to({"link": victim, "dangling": tmp_path / "new", "device": "/dev/null"}[kind])
    elif kind == "hard link":
        os.link(victim, lock)
    elif kind == "pipe":
        os.mkfifo(lock)
    elif kind == "folder":
        lock.mkdir()
    else:
        lock.write_text("notes of somebody")
    if kind == "folder":
        lock_save(str(folder)) if of_save else lock_run(folder, "name")
    else:
        with pytest.raises(FolderInUse, match="no lock"):
            lock_save(str(folder)) if of_save else lock_run(folder, "name")
    assert victim.read_text() == "ssh-ed25519 mine" and not (tmp_path / "new").exists()
    assert kind != "other file" or lock.read_text() == "notes of somebody"


def test_a_folder_of_locks_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ssh").mkdir()
    (tmp_path / RUN_LOCKS).symlink_to(tmp_path / "ssh")
    with pytest.raises(FolderInUse, match="no lock"):
        lock_run(tmp_path, "config")
    assert not list((tmp_path / "ssh").iterdir())
