"""The stacks of the processes of a run, with py-spy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slime.observability.run_state import RunState
from slime.plugins.tools.doctor import diagnose
from slime.plugins.tools.doctor import evidence as module
from slime.plugins.tools.doctor.evidence import find_py_spy, stacks
from slime.plugins.tools.doctor.facts import Facts, Process

CODE = """
import sys, time
def waits_for_the_engine():
    print("ready", flush=True)
    time.sleep(600)
waits_for_the_engine()
"""


@pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed (pip install py-spy)")
def test_a_waiting_process_shows_the_function_in_which_it_waits() -> None:
    process = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        lines = stacks([(process.pid, "rank 0"), (process.pid, "/x/ray/dashboard/agent.py")])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if "CAP_SYS_PTRACE" in lines[0]:
        pytest.skip(f"this machine does not let a process look into another one: {lines[0]}")
    assert len(lines) == 1, "Ray's own servers are left out"
    assert (
        lines[0].startswith(f"pid {process.pid} (rank 0): ")
        and "waits_for_the_engine (" in lines[0]
    )


def test_without_py_spy_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_py_spy", lambda: None)
    (line,) = stacks([(1, "driver")])
    assert "pip install py-spy" in line


def test_the_frames_of_the_main_thread_and_the_innermost_of_slime() -> None:
    deep = "".join(f"    f{i} (lib/other.py:{i})\n" for i in range(6))
    dump = (
        "Process 7: python train.py\nPython v3.11\n\n"
        'Thread 8 (idle): "helper"\n    wrong (a.py:1)\n'
        f'Thread 7 (idle): "MainThread"\n{deep}    step (slime/cluster/run.py:4)\n    <module> (train.py:1)\n'
    )
    frames = module._main_thread(dump, 7)
    assert frames == [
        *(f"f{i} (lib/other.py:{i})" for i in range(4)),
        "...",
        "step (slime/cluster/run.py:4)",
    ]
    assert module._main_thread("Error: no permission", 7) == []


# --- named waits
# ------------------------------------------------------------------------------------


def waiting(seconds: float, deadline: float = 1000.0, times: int = 0) -> Facts:
    said = {"engine-0": {"phase": "generate", "done": 3, "total": 64, "updated": 940.0}}
    state = RunState(
        "running", 7, "host", "rollout", 0.0, "", "rollout 4", 1000.0 - seconds, deadline, said
    )  # type: ignore[arg-type]
    return Facts(
        Path("run"), steps=[{"perf/rollout_time": 1.0}] * times, state=state, now=1000.0,
        processes=[Process(7, "train.py", False)], stacks=lambda them: [f"stack of {pid}" for pid, _ in them],
    )  # fmt: skip


def test_a_long_wait_is_named_with_what_was_said_and_the_stacks() -> None:
    (found,) = diagnose(waiting(600))
    assert found.kind == "long_wait" and "rollout 4 since 600 s" in found.title
    assert found.evidence[1:] == ("engine-0 said 60 s ago: generate 3/64", "stack of 7")
    assert diagnose(waiting(400)) == [], "less than half of the deadline"


def test_a_phase_that_hangs_shows_them_too() -> None:
    (found,) = diagnose(waiting(400, times=4))
    assert found.kind == "phase_hangs" and "stack of 7" in found.evidence
    assert found.evidence[0] == "the driver waits for rollout 4 since 400 s (deadline 1000 s)"
