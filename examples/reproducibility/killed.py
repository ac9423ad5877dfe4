"""``train.py`` that is killed with SIGKILL in the middle of a step.

    KILL_AFTER=2 python examples/reproducibility/killed.py --run-name NAME --output-dir DIR <other flags of train.py>

Once the step after ``KILL_AFTER`` has generated, nothing is caught and nothing is flushed: what a
power cut leaves. Returns when no process of the run is alive any more.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from slime.engines.process import wait_gone

CHECKOUT = Path(__file__).resolve().parents[2]
LOOK_SECONDS = 0.1
DEADLINE_SECONDS = 1800.0
GONE_SECONDS = 180.0  # agents of Ray notice after a minute that they are alone


def option(words: list[str], name: str) -> str:
    """The value after ``name``.

    Raises:
        SystemExit: it is not there.
    """
    if name not in words[:-1]:
        sys.exit(f"killed.py: {name} is missing")
    return words[words.index(name) + 1]


def run_and_kill(command: list[str], due: Path, deadline: float = DEADLINE_SECONDS) -> int:
    """Start ``command`` and SIGKILL it as soon as ``due`` exists; returns the number of processes
    that died with it.

    Raises:
        SystemExit: it ended by itself, ``due`` did not appear within ``deadline`` seconds, or
            processes survived.
    """
    began = time.time()  # an earlier run of that name may have left a file like it
    process = subprocess.Popen(command)
    until = time.monotonic() + deadline
    while not (due.exists() and due.stat().st_mtime >= began):
        if process.poll() is not None:
            sys.exit(
                f"killed.py: the run ended with {process.returncode} before it could be killed"
            )
        if time.monotonic() > until:
            process.kill()
            sys.exit(f"killed.py: {due} did not appear within {deadline:.0f} s")
        time.sleep(LOOK_SECONDS)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    left = wait_gone(family, GONE_SECONDS)
    if left:
        sys.exit(
            f"killed.py: still alive after {GONE_SECONDS:.0f} s: "
            f"{', '.join(str(p.pid) for p in left)}"
        )
    return len(family) + 1


def main() -> None:
    flags = sys.argv[1:]
    run = Path(option(flags, "--output-dir")) / option(flags, "--run-name")
    step = int(os.environ.get("KILL_AFTER", "2"))
    # is there once the next step has generated
    due = run / "samples" / f"rollout_{step + 1:06d}.jsonl"
    count = run_and_kill([sys.executable, str(CHECKOUT / "train.py"), *flags], due)
    print(f"killed.py: after step {step}, killed with {count - 1} processes below it")


if __name__ == "__main__":
    main()
