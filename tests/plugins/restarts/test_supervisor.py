"""The parent of a driver: runs it again when it is lost, and changes nothing else about how a run
ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from slime.plugins.restarts import supervisor

pytestmark = pytest.mark.real

DRIVER = """
import json, os, shutil, signal, subprocess, sys, time
from pathlib import Path

from slime.cluster.stop_signals import PIPE_VARIABLE, REPORTS, SETTINGS_VARIABLE
from slime.plugins.restarts.recovery import LOST_CODE
from slime.cluster.stop_signals import StopRequested, StopSignals

how, here = sys.argv[1], Path(__file__).parent
assert REPORTS.attach() and PIPE_VARIABLE not in os.environ and SETTINGS_VARIABLE not in os.environ
restarts = REPORTS.settings.get("max_restarts", int(sys.argv[2]))
with (here / "starts").open("a") as file:
    print(*sys.argv[1:], json.dumps(REPORTS.settings), file=file)
if how == "before":
    os._exit(3)
REPORTS.tell(
    began={"max_restarts": restarts, "status_timeout": 1.0, "save": "ckpt", "run_name": "r", "output_dir": "o"}
)
if restarts == 2:
    REPORTS.tell(saved=True)
stop = StopSignals()
stop.install()
# What a dead raylet leaves behind: nobody is its parent any more.
child = "[sys.executable, '-c', 'import time; time.sleep(600)'], stdout=-3, stderr=-3"
orphan = "import subprocess, sys; print(subprocess.Popen(" + child + ").pid)"
if how in ("vanish", "vanish always", "killed", "asks"):
    pid = subprocess.run([sys.executable, "-c", orphan], stdout=subprocess.PIPE, text=True, close_fds=False).stdout
    (here / f"orphan{restarts}").write_text(pid)
    if restarts == 1 and how != "vanish always":
        REPORTS.tell(over=True)
        sys.exit(7)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "asks":
        REPORTS.tell(lost=True)
        REPORTS.tell(over=True)
        os._exit(LOST_CODE)
    os._exit(1)
if how in ("raylet", "ray::TrainActor") and restarts == 1:
    (here / how).symlink_to(shutil.which("sleep"))
    child = subprocess.Popen([here / how, "600"])
    (here / "child").write_text(str(child.pid))
    child.wait()
    os._exit(1)  # as Ray's C++ code does when the raylet is gone
if how in ("lost at the end", "fails afterwards"):
    REPORTS.tell(over=True)
    REPORTS.tell(in_shutdown=True, complete=True)
    if how == "fails afterwards":
        REPORTS.tell(in_shutdown=False)
    pid = subprocess.run([sys.executable, "-c", orphan], stdout=subprocess.PIPE, text=True, close_fds=False).stdout
    (here / "left").write_text(pid)
    os._exit(3)
if how == "fails":
    REPORTS.tell(over=True)
    raise SystemExit(5)
(here / "pid.part").write_text(str(os.getpid()))
(here / "pid.part").rename(here / "pid")  # the file is whole from the moment at which a test sees it
try:
    while True:
        stop.check()
        time.sleep(0.02)
except StopRequested as asked:
    REPORTS.tell(over=True)
    time.sleep(0.5)  # so that a signal that came twice had time to
    sys.exit({"SIGINT": 130, "SIGTERM": 143}[str(asked)])
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    (tmp_path / "driver.py").write_text(DRIVER)
    started: list[subprocess.Popen[str]] = []

    def run(how: str, restarts: int = 2) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-P",
            supervisor.__file__,
            "--",
            str(tmp_path / "driver.py"),
            how,
        ]
        root = str(Path(supervisor.__file__).resolve().parents[3])
        started.append(
            subprocess.Popen(
                [*command, str(restarts)],
                env={**os.environ, "PYTHONPATH": root}, stderr=subprocess.PIPE, text=True, start_new_session=True,
            )
        )  # fmt: skip
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
    if (tmp_path / "pid").exists():
        wait_until(lambda: not psutil.pid_exists(int((tmp_path / "pid").read_text())))


def wait_until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["vanish", "killed", "asks"])
def test_a_lost_driver_is_run_again_and_leaves_nothing_behind(
    start: Callable, tmp_path: Path, how: str
) -> None:
    """Also one that could say nothing: killed, or ended by a library."""
    run = start(how, restarts=3)
    _, words = run.communicate(timeout=40)
    assert run.returncode == 7
    again = {"run_name": "r", "output_dir": "o"}
    first = {"load": "ckpt", "ckpt_step": None, "start_rollout_id": None, "finetune": None}
    starts = [line.partition("{") for line in (tmp_path / "starts").read_text().splitlines()]
    assert [begin for begin, _, _ in starts] == [f"{how} 3 "] * 3
    assert [json.loads("{" + rest) for _, _, rest in starts] == [
        {}, {"max_restarts": 2, **again}, {"max_restarts": 1, **again, **first}
    ]  # fmt: skip
    assert words.count("lost the driver") == (0 if how == "asks" else 2)
    orphans = {int(file.name[-1]): int(file.read_text()) for file in tmp_path.glob("orphan*")}
    assert psutil.pid_exists(orphans[1]), "of a run that ended in order, so it was left on purpose"
    psutil.Process(orphans[1]).kill()
    assert sorted(orphans) == [1, 2, 3] and not any(psutil.pid_exists(orphans[n]) for n in (2, 3))


def test_the_number_of_restarts_is_bounded(start: Callable, tmp_path: Path) -> None:
    run = start("vanish always", restarts=2)
    assert run.wait(120) == 1
    assert len((tmp_path / "starts").read_text().splitlines()) == 3


@pytest.mark.parametrize(("how", "code"), [("before", 3), ("fails", 5)])
def test_an_error_is_passed_on(start: Callable, tmp_path: Path, how: str, code: int) -> None:
    """Before a run has begun, and where code is to blame."""
    assert start(how).wait(120) == code
    assert len((tmp_path / "starts").read_text().splitlines()) == 1


@pytest.mark.parametrize("whole_group", [False, True])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_is_one_wish(
    start: Callable, tmp_path: Path, number: signal.Signals, code: int, whole_group: bool
) -> None:
    """Ctrl-C in a terminal goes to the whole process group, ``kill`` to the one process that the
    user started.
    """
    run = start("waits")
    wait_until((tmp_path / "pid").exists)
    (os.killpg if whole_group else os.kill)(run.pid, number)
    assert run.wait(120) == code
    assert len((tmp_path / "starts").read_text().splitlines()) == 1


def test_the_second_signal_ends_at_once(start: Callable, tmp_path: Path) -> None:
    run = start("waits")
    wait_until((tmp_path / "pid").exists)
    driver = psutil.Process(int((tmp_path / "pid").read_text()))
    driver.suspend()
    os.kill(run.pid, signal.SIGTERM)
    time.sleep(0.1)
    os.kill(run.pid, signal.SIGINT)  # another number, or the two would be one while it is stopped
    driver.resume()
    assert run.wait(120) in (130, 143)


def last_words(run: subprocess.Popen[str]) -> str:
    """What a run that is told to end has written to stderr."""
    run.terminate()
    _, words = run.communicate(timeout=60)
    assert run.returncode == 143
    return words


def test_a_stopped_driver_is_lost(start: Callable, tmp_path: Path) -> None:
    """One that is stopped for a moment goes on, one that is stopped for longer than the limit is
    run again.
    """
    run = start("waits", restarts=1)
    wait_until((tmp_path / "pid").exists)
    first = psutil.Process(int((tmp_path / "pid").read_text()))
    first.suspend()
    first.resume()
    (tmp_path / "pid").unlink()
    first.suspend()
    wait_until((tmp_path / "pid").exists)
    assert not psutil.pid_exists(first.pid)
    words = last_words(run)
    assert "1 s (--status-timeout)" in words and "signal 9" in words


@pytest.mark.parametrize(
    ("name", "told"), [("raylet", "Ray's raylet"), ("ray::TrainActor", "ray::TrainActor")]
)
def test_a_stopped_process_of_ray_is_lost(
    start: Callable, tmp_path: Path, name: str, told: str
) -> None:
    run = start(name, restarts=1)
    wait_until(lambda: (tmp_path / "child").exists() and bool((tmp_path / "child").read_text()))
    child = psutil.Process(int((tmp_path / "child").read_text()))
    child.suspend()
    wait_until((tmp_path / "pid").exists)
    assert not psutil.pid_exists(child.pid)
    words = last_words(run)
    assert f"{told} was stopped for 1 s (--status-timeout)" in words and "code 1" in words


@pytest.mark.parametrize(("how", "code"), [("lost at the end", 0), ("fails afterwards", 3)])
def test_a_complete_run_does_not_fail_in_its_shutdown(
    start: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, code: int
) -> None:
    """What a driver leaves that ends in its shutdown is removed: processes, and the folder of
    torch's shared memory manager. After the shutdown, both are the user's own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = tmp_path / "torch-shm-dir-dead00"
    folder.mkdir()
    os.utime(folder, (time.time() - 60,) * 2)
    run = start(how)
    _, words = run.communicate(timeout=120)
    left = int((tmp_path / "left").read_text())
    assert run.returncode == code and folder.exists() == psutil.pid_exists(left) == (code != 0)
    assert ("code 3" in words) is (code == 0)
    if code:
        os.kill(left, signal.SIGKILL)


def test_a_killed_supervisor_takes_the_driver_along(start: Callable, tmp_path: Path) -> None:
    run = start("waits")
    wait_until((tmp_path / "pid").exists)
    run.kill()
    wait_until(lambda: not psutil.pid_exists(int((tmp_path / "pid").read_text())))


def test_a_signal_between_two_drivers_ends_the_run(start: Callable, tmp_path: Path) -> None:
    """When it comes while the next driver is being started, there is nobody yet to pass it on
    to.
    """
    script = tmp_path / "between.py"
    script.write_text(
        "import os, signal, sys\n"
        "from slime.plugins.restarts import supervisor\n"
        "make = supervisor.Driver\n"
        "def struck(child, pipe):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return make(child, pipe)\n"
        "supervisor.Driver = struck\n"
        "sys.exit(supervisor.Supervisor(sys.argv[1:]).run())\n"
    )
    run = subprocess.Popen([sys.executable, str(script), "-c", "import time; time.sleep(60)"])
    try:
        assert run.wait(120) == 143
    finally:
        run.kill()


def test_a_process_that_cannot_be_killed_is_left_behind_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Held:
        pid = 4321

        def kill(self) -> None:
            raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(supervisor, "KILLED_SECONDS", 0.2)
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive=False: [Held()])
    supervisor.end_descendants(0.0)
    assert "processes 4321" in capsys.readouterr().err
