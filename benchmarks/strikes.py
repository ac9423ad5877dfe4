"""A campaign of strikes on the processes of real runs.

    python benchmarks/strikes.py --output strikes.jsonl                     # all cells, those of the file are skipped
    python benchmarks/strikes.py --only 'engine:*:SIGKILL' --mode synchronous
    python benchmarks/strikes.py --sample 10 --seed 1
    python benchmarks/strikes.py --cover                # every pair of mode, target, phase and signal (strike_cover.py)
    python benchmarks/strikes.py --table                                    # Markdown of what the output file has

A cell is a mode, a target, a phase and a signal. A run (a tiny random model on the CPU, embedded
engine behind the router, ``--use-fault-tolerance``) is struck in a chain of cells, a few steps
apart, and waits in each phase until the blow has fallen (``strike_hooks.py``). Each cell must go
on, restart from its snapshot, or end with a message that names the cause, within its deadline.
After the run the ledger must close, all rewards, losses and the weights after each step must equal
those of an undisturbed run where the mode promises it, and no process, shared memory or socket of
the run may be left. If the end of a chain falls short, each of its cells is struck again alone;
cells behind one that ended the run are struck in another run.

Appends one line of JSON for each cell to ``--output`` and prints it.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from random_model import write_model
from run_processes import MARK, alive, command_line, of_role
from strike_cells import (
    CHECKOUT,
    FIRST,
    HOOKS,
    MODES,
    Cell,
    Found,
    Mode,
    absent,
    all_cells,
    chains,
    rollouts_of,
    steps_of,
)  # fmt: skip
from strike_cover import cover
from strike_hooks import BATCH, EVALUATED, FOLDER
from strike_results import clear, differences, last_words, read_results, steps_in, table

from slime.plugins.tools.summary import read_ledger

POLL_SECONDS = 0.02
REACH_SECONDS = 300.0  # without a step, for a run to reach the phase of its next strike
GONE_SECONDS = 60.0  # for the processes of a run to end after it
START_SECONDS = 0.3  # after which a process that appeared in the start is struck
QUICK: tuple[object, ...] = (
    "--status-timeout", 30, "--rollout-health-check-interval", 2, "--rollout-health-check-timeout", 15,
    "--reward-timeout", 20, "--phase-timeout", 120, "--distributed-timeout-minutes", 1, "--start-timeout", 100,
)  # fmt: skip
"""Deadlines shorter than the defaults, so that a frozen process is noticed sooner than after two
minutes.
"""


# --- one run -------------------------------------------------------------------------------------


@dataclass
class Work:
    """The folder with the model and the data of all runs."""

    folder: Path

    def prepare(self) -> None:
        if not (self.folder / "model").exists():
            write_model("tiny", self.folder / "model")
        for name, word in (("prompts", "Write"), ("evaluation", EVALUATED)):
            rows = [
                {"prompt": f"{word} the letter {'abcd'[i % 4]}.", "label": "abcd"[i % 4]}
                for i in range(16)
            ]
            lines = [json.dumps(row) + "\n" for row in (rows if name == "prompts" else rows[:2])]
            (self.folder / f"{name}.jsonl").write_text("".join(lines))

    def command(self, mode: Mode, steps: int, name: str) -> list[str]:
        flags: list[object] = [
            "--hf-checkpoint", self.folder / "model", "--prompt-data", self.folder / "prompts.jsonl",
            "--apply-chat-template", "--eval-prompt-data", "letters", self.folder / "evaluation.jsonl",
            "--eval-interval", 1, "--custom-rm-path", f"{HOOKS}:reward", "--rollout-data-postprocess-path",
            f"{HOOKS}:in_trainer", "--custom-generate-function-path", f"{HOOKS}:generate", "--verifier-env", MARK,
            FOLDER, "--reward-workers", 1, "--lr", "1e-3", "--num-rollout", steps, "--rollout-batch-size", BATCH,
            "--n-samples-per-prompt", 2, "--rollout-max-response-len", 32, "--eval-max-response-len", 16,
            "--rollout-backend", "embedded", "--rollout-shuffle", "--deterministic", "--update-weight-buffer-size",
            100_000, "--use-fault-tolerance", "--max-restarts", 12, "--save-interval", 1, "--save-keep-last", 2,
            "--run-name", name, *QUICK,
        ]  # fmt: skip
        if "--train-backend" not in mode.flags:
            flags += ["--train-backend", "fsdp"]
        return [sys.executable, str(CHECKOUT / mode.script), *map(str, [*flags, *mode.flags])]


class StruckRun:
    """One run with its strikes.

    Args:
        deadline: Seconds after a strike within which the run must make its next step or end.
    """

    def __init__(
        self, work: Work, chain: Sequence[Cell], mode: str, steps: int, deadline: float
    ) -> None:
        self.chain, self.mode, self.deadline = chain, MODES[mode], deadline
        self.mark = uuid.uuid4().hex
        self.name = self.mark[:8]
        self.cwd = work.folder / "runs" / self.name
        self.out = self.cwd / "outputs" / "run"
        self.found = [Found("not reached") for _ in chain]
        self.pids: set[int] = set()
        self.loads: set[str] = set()
        self.cwd.mkdir(parents=True)
        plan = [
            (cell.phase, rollout) for cell, rollout in zip(chain, rollouts_of(chain), strict=True)
        ]
        (self.cwd / "plan.json").write_text(json.dumps(plan))
        # A folder of its own, in which only this run can have left something. Its path is short,
        # for sockets.
        self.temporary = Path(tempfile.mkdtemp(prefix="strike-"))
        self.shared_before = shared_memory()
        path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]))
        own = {
            MARK: self.mark,
            FOLDER: str(self.cwd),
            "PYTHONPATH": path,
            "TMPDIR": str(self.temporary),
        }
        with open(self.cwd / "output.txt", "wb") as output:
            self.process = subprocess.Popen(
                work.command(self.mode, steps, "run"), cwd=self.cwd, env={**os.environ, **own},
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    def output(self) -> str:
        return (self.cwd / "output.txt").read_text(errors="replace")

    def last_step(self) -> int:
        rows = steps_in(self.out)
        return max(rows, default=-1)

    def strike_all(self) -> None:
        """Strike one cell after the other, and wait after each until the run has gone on or
        ended.
        """
        for number, (cell, rollout) in enumerate(
            zip(self.chain, rollouts_of(self.chain), strict=True)
        ):
            restarts = self._restarts()
            if not self._strike(number, cell):
                return
            since, size = time.monotonic(), len(self.output())
            # The step after the struck one: the row of the struck one may come from the snapshot.
            done = (
                self._over
                if cell.phase == "end"
                else lambda rollout=rollout: self.last_step() > rollout
            )
            reached = self._wait(lambda done=done: done() or self._over(), self.deadline)
            found = self.found[number] = Found(
                "hung" if not reached else "went on", time.monotonic() - since
            )
            if self._restarts() > restarts:
                found.outcome = "restarted"
            if not reached:
                found.outcome, found.message = "hung", last_words(self.output()[size:])
                return
            if self._over() and self.process.returncode != 0:
                found.outcome, found.message = "ended", last_words(self.output()[size:])
                return
        self._wait(self._over, self.deadline)

    def _strike(self, number: int, cell: Cell) -> bool:
        """Wait until the run is in the phase and send the signal; False if the run ended or hung
        before.
        """
        reached = self.cwd / f"reached-{number}"

        def ready() -> bool:
            if cell.phase == "start":
                return bool(of_role(self.mark, cell.target)) and self.out.exists()
            return reached.exists() and bool(reached.read_text())

        if not self._wait(lambda: ready() or self._over(), REACH_SECONDS) or not ready():
            self.found[number].message = last_words(self.output())
            return False
        if cell.phase == "start":
            time.sleep(START_SECONDS)
        victims = of_role(self.mark, cell.target)
        holder = int(reached.read_text()) if cell.phase != "start" else 0
        chosen = [process for process in victims if process.pid == holder] or victims[-1:]
        self._note()
        for process in chosen:
            process.send_signal(signal.Signals[cell.signal])
        (self.cwd / f"struck-{number}").touch()
        self.found[number].message = "" if chosen else f"there was no {cell.target}"
        return bool(chosen)

    def _note(self) -> None:
        """Note the processes and the shared memory of routers, whose names do not tell the run."""
        for process in alive(self.mark):
            self.pids.add(process.pid)
            with contextlib.suppress(OSError):
                self.loads.update(
                    re.findall(
                        r"sglang_loads_\w+\.shm", Path(f"/proc/{process.pid}/maps").read_text()
                    )
                )

    def _restarts(self) -> int:
        return self.output().count("going on from ")

    def _over(self) -> bool:
        return self.process.poll() is not None

    def _wait(self, done: Any, seconds: float) -> bool:
        """Wait until ``done``; every step that the run makes begins the deadline anew."""
        since, step = time.monotonic(), self.last_step()
        while not done():
            if (now := self.last_step()) != step:
                since, step = time.monotonic(), now
            if time.monotonic() > since + seconds:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def decided(self, found: Found, sound: bool) -> bool:
        """Whether it is known what came of a cell: the end of the run speaks for all, or this cell
        ended it.
        """
        return found.outcome in ("ended", "hung") or (sound and found.outcome != "not reached")

    def close(self) -> list[str]:
        """End what is left of the run; returns what it had left behind after its own end."""
        over = self._over()
        until = time.monotonic() + GONE_SECONDS
        while over and alive(self.mark) and time.monotonic() < until:
            time.sleep(0.2)
        left = (
            [f"process {' '.join(command_line(process))[:100]}" for process in alive(self.mark)]
            if over
            else []
        )
        if not over:
            self.process.kill()
        for _ in range(50):
            for process in alive(self.mark):
                with contextlib.suppress(Exception):
                    process.kill()
            if not alive(self.mark):
                break
            time.sleep(0.1)
        self.process.wait()
        if over:
            left += [
                f"shared memory {name}" for name in self._own(shared_memory() - self.shared_before)
            ]
            # Ray keeps the folder of a session, with its logs and dead sockets, and torch its
            # compiled kernels.
            left += [
                one.name
                for one in self.temporary.iterdir()
                if not one.name.startswith(("ray", "torchinductor"))
            ]
        shutil.rmtree(self.temporary, ignore_errors=True)
        return left

    def _own(self, names: Iterable[str]) -> list[str]:
        """Those that this run made: other runs of this machine have names with other process
        ids.
        """
        numbers = {name: {int(word) for word in re.findall(r"\d+", name)} for name in names}
        return sorted(
            name for name, words in numbers.items() if words & self.pids or name in self.loads
        )


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def judge(run: StruckRun, left: list[str], reference: Path) -> bool:
    """Complete what was found of each cell; returns whether the end of the run is as promised."""
    try:
        problems = read_ledger(run.out / "ledger.jsonl").problems
    except FileNotFoundError:
        problems = ["there is no ledger"]
    # a run that ended before its first step has no account
    closes = not problems or run.last_step() < 0
    unlike = differences(run.out, reference)
    faults = problems[:3] if not closes else []
    faults += [f"left behind: {', '.join(left)}"] if left else []
    promised = all(cell.target not in run.mode.differ for cell in run.chain)
    faults += (
        [f"differs: {', '.join(unlike[:6])}"]
        if unlike and promised and run.last_step() >= 0
        else []
    )
    for found in run.found:
        found.account, found.left = closes, left
        found.equal = not unlike if promised and run.last_step() >= 0 else None
        fits = found.outcome in ("went on", "restarted") or (
            found.outcome == "ended" and clear(found.message)
        )
        found.ok = fits and not faults
        if fits and faults:
            found.message = "; ".join(faults)
    return not faults


# --- the campaign ---------------------------------------------------------------------------------


@dataclass
class Campaign:
    work: Work
    output: Path
    deadline: float

    def reference(self, mode: str, steps: int) -> Path:
        """The folder of an undisturbed run of at least so many steps, which is made when it is
        first needed.
        """
        kept = self.work.folder / "references" / mode.replace(" ", "-")
        if len(steps_in(kept)) >= steps:
            return kept
        run = StruckRun(self.work, [], mode, steps, self.deadline)
        try:
            run._wait(run._over, self.deadline)
        finally:
            left = run.close()
        if run.process.returncode != 0 or left:
            raise SystemExit(
                f"the undisturbed run of {mode} failed ({left}):\n{run.output()[-3000:]}"
            )
        kept.parent.mkdir(exist_ok=True)
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(run.out, kept)
        return kept

    def strike(self, chain: Sequence[Cell]) -> None:
        """Strike a chain and write what came of its cells; those that it leaves open are struck
        alone.
        """
        mode = chain[0].mode
        # All chains of a mode are compared with one run: how long a run is changes nothing in its
        # steps.
        reference = self.reference(mode, max(steps_of(chain), FIRST + 8 * MODES[mode].apart))
        run = StruckRun(self.work, chain, mode, steps_of(chain), self.deadline)
        try:
            run.strike_all()
        finally:
            left = run.close()
        sound = judge(run, left, reference)
        for cell, found in zip(chain, run.found, strict=True):
            if len(chain) == 1 or run.decided(found, sound):
                self.write(cell, found, chain)
        if all(found.ok for found in run.found):
            shutil.rmtree(run.cwd)
        else:
            print(
                f"kept: {run.cwd}: "
                f"{' | '.join(found.message for found in run.found if not found.ok)}",
                flush=True,
            )
        struck = [found.outcome != "not reached" for found in run.found]
        open_cells = [
            cell
            for cell, found in zip(chain, run.found, strict=True)
            if not run.decided(found, sound)
        ]
        unreached = chain[sum(struck) :] if any(struck) else []  # behind a cell that ended the run
        for cell in open_cells if len(chain) > 1 else []:
            if cell not in unreached:
                self.strike([cell])
        if unreached:
            self.strike(unreached)

    def write(self, cell: Cell, found: Found, chain: Sequence[Cell] = ()) -> None:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=CHECKOUT, capture_output=True, text=True
        ).stdout.strip()
        others = [other.place for other in chain if other != cell]
        found.seconds = round(found.seconds, 1)
        found.message = found.message.replace(f"{CHECKOUT}/", "").replace(f"{sys.prefix}/", "")
        line = {
            **asdict(cell),
            **asdict(found),
            "chain": others,
            "date": time.strftime("%Y-%m-%d"),
            "commit": commit,
        }
        with self.output.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=CHECKOUT / "benchmarks" / "results" / "strikes.jsonl"
    )
    parser.add_argument(
        "--work", type=Path, default=CHECKOUT / "outputs" / "benchmarks" / "strikes"
    )
    parser.add_argument(
        "--mode", choices=MODES, action="append", help="default: all; may be given several times"
    )
    parser.add_argument(
        "--only", action="append", help="target:phase:signal, each a name or a pattern such as *"
    )
    parser.add_argument("--sample", type=int, help="so many cells, drawn by --seed")
    parser.add_argument(
        "--cover", action="store_true", help="the fewest cells with what is not covered yet"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--chain", type=int, default=7, help="most cells of the middle of one run (default: 7)"
    )
    parser.add_argument("--runs", type=int, help="stop after so many chains")
    parser.add_argument(
        "--deadline", type=float, default=180.0, help="seconds without a step (default: 180)"
    )
    parser.add_argument("--list", action="store_true", help="print the chains, strike nothing")
    parser.add_argument(
        "--table", action="store_true", help="print the table of --output, strike nothing"
    )
    return parser.parse_args()


def chosen(options: argparse.Namespace, known: Iterable[Cell]) -> list[Cell]:
    """The cells that are asked for and not in the output file yet."""
    cells = [cell for cell in all_cells() if not options.mode or cell.mode in options.mode]
    if options.only:
        cells = [
            cell
            for cell in cells
            if any(fnmatch.fnmatchcase(cell.place, only) for only in options.only)
        ]
    if options.sample is not None:
        drawn = set(random.Random(options.seed).sample(cells, min(options.sample, len(cells))))
        cells = [cell for cell in cells if cell in drawn]
    done = set(known)
    if options.cover:
        return cover(cells, done, options.seed)
    return [cell for cell in cells if cell not in done]


def main() -> int:
    options = parse()
    if options.table:
        print(table(read_results(options.output)))
        return 0
    cells = chosen(options, read_results(options.output))
    made = chains([cell for cell in cells if not absent(cell)], options.chain)[: options.runs]
    if options.list:
        print(
            "\n".join(
                f"{chain[0].mode}: {' '.join(cell.place for cell in chain)}" for chain in made
            )
        )
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run in progress is ended
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(Work(options.work), options.output, options.deadline)
    campaign.work.prepare()
    for cell in cells:
        if reason := absent(cell):
            campaign.write(cell, Found("absent", account=True, message=reason, ok=True))
    for chain in made:
        campaign.strike(chain)
    results = read_results(options.output)
    return 0 if all(results[cell]["ok"] for cell in cells if cell in results) else 1


if __name__ == "__main__":
    sys.exit(main())
