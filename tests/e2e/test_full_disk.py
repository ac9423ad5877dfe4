"""The disk of the snapshots is full: the run pauses, goes on when there is room, and nothing incomplete is read."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime.checkpoint.snapshot import snapshots

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]
MOUNTED = "mount -t tmpfs -o size=6m full {disk} && exec {command}"
REWARD = '''
"""The reward of the other tests. With the rollout that has the group FILL_AT, it fills the disk."""
import contextlib
from pathlib import Path


async def reward(args, sample, **kwargs):
    if sample.group_index == FILL_AT:
        with contextlib.suppress(OSError), open(Path(r"DISK") / "ballast", "wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
    return sum(c == sample.label for c in sample.response) + 0.01 * (len(sample.response) % 7)
'''
PAUSED = "is full: the run is paused"


def can_mount() -> bool:
    """Whether this user may mount a file system in a namespace of its own."""
    tried = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True)
    return tried.returncode == 0


@pytest.fixture
def small_disk_run(runner, flags, tmp_path):
    """Starts a run that saves after each rollout to ``disk``, which only the run's processes see; a reward fills it."""
    if not can_mount():
        pytest.skip("mounting a file system in a namespace of its own is not allowed here")
    disk = tmp_path / "disk"
    disk.mkdir()

    def start(*more: object, fill_at: int = 4):
        hooks = tmp_path / "filling.py"
        hooks.write_text(REWARD.replace("FILL_AT", str(fill_at)).replace("DISK", str(disk)))
        command = [sys.executable, str(Path(__file__).parents[2] / "train.py"), *map(str, flags)]
        command += ["--custom-rm-path", f"{hooks}:reward"]
        command += ["--run-name", "run", "--save", str(disk), "--save-interval", "1", "--save-keep-last", "1"]
        command += [*map(str, more)]
        shell = MOUNTED.format(disk=disk, command=" ".join(f"'{word}'" for word in command))
        return runner.spawn(["unshare", "-rm", "sh", "-c", shell]), disk

    return start


def seen_by(process: subprocess.Popen, path: Path) -> Path:
    """``path`` as the processes of the run see it, with the file systems that they have mounted."""
    return Path(f"/proc/{process.pid}/root{path}")


def read_until(process: subprocess.Popen, text: str, seconds: float = 200) -> str:
    """The output of a run up to the line with ``text``."""
    assert process.stdout is not None
    lines: list[str] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until and (line := process.stdout.readline()):
        lines.append(line)
        if text in line:
            return "".join(lines)
    pytest.fail(f"the run did not print {text!r} but:\n{''.join(lines)}")


@pytest.mark.parametrize("more", [["--actor-num-gpus-per-node", "2"], ["--async-save"]], ids=["ranks", "async"])
def test_a_run_waits_for_room_and_ends_with_the_same_numbers(small_disk_run, runner, flags, more) -> None:
    process, disk = small_disk_run(*more)
    said = read_until(process, PAUSED)
    inside = seen_by(process, disk)
    complete = [snapshot.iteration for snapshot in snapshots(inside)]
    assert complete in ([0], [0][: "--async-save" not in more]), "only what was complete before is read"
    (inside / "ballast").unlink()
    result = runner.finish(process, "run")
    assert result.code == 0, said + result.output
    assert said.count(PAUSED) == 1 and "there is room again" in result.output
    undisturbed = runner.run(*flags, *more, name="undisturbed")
    for row, same in zip(result.metrics(), undisturbed.metrics(), strict=True):
        assert {name: value for name, value in row.items() if name.startswith(("train/", "rollout/reward"))} == {
            name: value for name, value in same.items() if name.startswith(("train/", "rollout/reward"))
        }


def test_ctrl_c_ends_a_paused_run_and_says_what_is_not_saved(small_disk_run, runner) -> None:
    process, disk = small_disk_run()
    read_until(process, PAUSED)
    process.send_signal(signal.SIGTERM)
    result = runner.finish(process, "run", timeout=120)
    assert result.code == 143, result.output
    assert "rollout 1 is not saved" in result.output and "the newest snapshot is of rollout 0" in result.output
    assert "Traceback" not in result.output
    assert runner.wait_gone() == []


def test_an_export_waits_for_room_too(small_disk_run, runner, tmp_path) -> None:
    """The snapshots have room, the export does not; it has no index or config before it is complete."""
    exports = tmp_path / "disk" / "hf"
    process, disk = small_disk_run("--save", tmp_path / "snapshots", "--save-hf", exports, fill_at=0)
    read_until(process, PAUSED)
    inside = seen_by(process, exports)
    assert not (inside / "config.json").is_file()
    (seen_by(process, disk) / "ballast").unlink()
    result = runner.finish(process, "run")
    assert result.code == 0, result.output
    assert len(list((tmp_path / "snapshots").glob("iter_*"))) == 1
