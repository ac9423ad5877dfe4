"""Two runs that would write to one folder: the second one is refused before it touches anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from make_args import make_args

from slime.cluster.folder_lock import FolderInUse
from slime.cluster.start import Parts, prepare
from slime.config.args import Args

HOLDS = """
import sys
from slime.cluster.folder_lock import lock_save
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
    with pytest.raises(FolderInUse, match=r"run is in use by a run .*\(process \d+ on .*--run-name"):
        prepare(args_of(tmp_path))
    assert first.dir.metrics.is_file() and not (tmp_path / "run.1").exists(), "it was not moved aside"
    end(prepare(args_of(tmp_path, "other")))
    end(first)
    end(prepare(args_of(tmp_path)))
    assert (tmp_path / "run.1" / "metrics.jsonl").is_file(), "it has ended, so it makes room"


def test_two_runs_never_save_to_one_folder(tmp_path: Path) -> None:
    save = tmp_path / "first" / "checkpoints"
    first = prepare(args_of(tmp_path, "first", save))
    with pytest.raises(FolderInUse, match=f"--save {save} is in use by a run"):
        prepare(args_of(tmp_path, "second", save))
    end(first)
    end(prepare(args_of(tmp_path, "second", save)))


def test_a_killed_run_can_be_resumed_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        with pytest.raises(FolderInUse, match=f"process {process.pid} on"):
            prepare(args_of(tmp_path / "outputs", "resumed", tmp_path))
        process.kill()
        process.wait()
        end(prepare(args_of(tmp_path / "outputs", "resumed", tmp_path)))
