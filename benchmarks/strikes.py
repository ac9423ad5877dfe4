"""A campaign of strikes on the processes of real runs.

    python benchmarks/strikes.py --output strikes.jsonl                     # all cells, those of the file are skipped
    python benchmarks/strikes.py --only 'engine:*:SIGKILL' --mode synchronous
    python benchmarks/strikes.py --sample 10 --seed 1
    python benchmarks/strikes.py --table                                    # Markdown of what the output file has

A cell is a mode, a target, a phase and a signal. A run (a tiny random model on the CPU, embedded engine behind the
router, ``--use-fault-tolerance``) is struck in a chain of cells, a few steps apart, and waits in each phase until the
blow has fallen (``strike_hooks.py``). Each cell must go on, restart from its snapshot, or end with a message that names
the cause, within its deadline. After the run the ledger must close, all rewards, losses and the weights after each
step must equal those of an undisturbed run where the mode promises it, and no process, shared memory or socket of the
run may be left. If the run of a chain falls short after its last strike, each of its cells is struck again alone.

Appends one line of JSON for each cell to ``--output`` and prints it.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import itertools
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from random_model import write_model
from run_processes import MARK, ROLES, alive, command_line, of_role
from strike_hooks import BATCH, EVALUATED, FOLDER

from slime.checkpoint.ledger_report import read_ledger
from slime.observability.run_record import read_weights

CHECKOUT = Path(__file__).resolve().parents[1]
HOOKS = CHECKOUT / "benchmarks" / "strike_hooks.py"
MEGATRON_SITE = CHECKOUT / "tests" / "backends" / "megatron" / "cpu_site"
TARGETS = tuple(ROLES)
MIDDLE = ("generate", "reward", "train", "sync", "evaluation", "save")
PHASES = ("start", *MIDDLE, "end")
SIGNALS = ("SIGKILL", "SIGSTOP")
ABSENT = {("verifier", "start"): "verifiers start with the first judgement"}
NO_WORKER = "no mode has rollout workers: the rollout manager generates"
POLL_SECONDS = 0.02
GONE_SECONDS = 60.0  # for the processes of a run to end after it
START_SECONDS = 0.3  # after which a process that appeared in the start is struck
FIRST = 1  # the rollout of the first strike
QUICK: tuple[object, ...] = (
    "--status-timeout", 30, "--rollout-health-check-interval", 2, "--rollout-health-check-timeout", 15,
    "--reward-timeout", 20, "--phase-timeout", 120, "--distributed-timeout-minutes", 1, "--start-timeout", 150,
)  # fmt: skip
"""Deadlines shorter than the defaults, so that a frozen process is noticed sooner than after two minutes."""


@dataclass(frozen=True)
class Mode:
    """How the struck runs train.

    Attributes:
        apart: Steps between two strikes of a run.
        differ: Targets after whose loss the mode does not promise the numbers of an undisturbed run.
    """

    flags: tuple[object, ...] = ()
    script: str = "train.py"
    apart: int = 2
    differ: frozenset[str] = frozenset()


# A restarted engine of an asynchronous run gets the weights that the trainer has then.
_ASYNCHRONOUS = frozenset({"engine", "engine actor"})
_MEGATRON = json.dumps({"PYTHONPATH": os.pathsep.join([str(MEGATRON_SITE), str(CHECKOUT)])})
_TWO_RANKS = ("--actor-num-gpus-per-node", 2)
_FULLY = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
MODES = {
    "synchronous": Mode(),
    "one-step": Mode(("--async-buffer-size", 1), "train_async.py", 3, _ASYNCHRONOUS),
    "two ranks": Mode(_TWO_RANKS),
    "fully asynchronous": Mode(
        ("--async-buffer-size", 2, "--rollout-function-path", _FULLY), "train_async.py", 5, frozenset(TARGETS)
    ),
    "Megatron TP2": Mode(
        (*_TWO_RANKS, "--tensor-model-parallel-size", 2, "--train-backend", "megatron", "--train-env-vars", _MEGATRON)
    ),
}


@dataclass(frozen=True)
class Cell:
    mode: str
    target: str
    phase: str
    signal: str

    @property
    def place(self) -> str:
        return f"{self.target}:{self.phase}:{self.signal}"


@dataclass
class Found:
    """What came of a strike.

    Attributes:
        outcome: ``went on``, ``restarted``, ``ended``, ``hung``, ``not reached`` or ``absent``.
        seconds: From the strike to the end of the step after it (or of the run).
        account: Whether the ledger closes.
        equal: Whether the numbers are those of an undisturbed run; None where the mode does not promise it.
        left: What the run left behind.
        ok: Whether all of this is as promised.
    """

    outcome: str
    seconds: float = 0.0
    account: bool = False
    equal: bool | None = None
    left: list[str] = field(default_factory=list)
    message: str = ""
    ok: bool = False


def all_cells() -> list[Cell]:
    """The cells in the order in which they are struck: the widest coverage first."""
    order = [("synchronous", "SIGKILL"), ("synchronous", "SIGSTOP")]
    order += [(mode, number) for number in SIGNALS for mode in MODES if mode != "synchronous"]
    return [Cell(mode, target, phase, number) for mode, number in order for phase in PHASES for target in TARGETS]


def absent(cell: Cell) -> str:
    """Why there is no such process; empty if there is one."""
    return NO_WORKER if cell.target == "worker" else ABSENT.get((cell.target, cell.phase), "")


def chains(cells: Sequence[Cell], most: int) -> list[list[Cell]]:
    """Cells that are struck in one run, in the order of time: at most ``most`` of the middle, a start and an end."""
    made: list[list[Cell]] = []
    for _, some in itertools.groupby(cells, lambda cell: (cell.mode, cell.signal)):
        same = list(some)
        starts = [cell for cell in same if cell.phase == "start"]
        ends = [cell for cell in same if cell.phase == "end"]
        parts = []
        for phase in MIDDLE:  # cells of one phase have different targets
            parts += _parts([cell for cell in same if cell.phase == phase], most)
        while starts or ends or parts:
            middle = parts.pop(0) if parts else []
            made.append([*starts[:1], *middle, *ends[:1]])
            del starts[:1], ends[:1]
    return made


def _parts(cells: list[Cell], most: int) -> list[list[Cell]]:
    return [cells[i : i + most] for i in range(0, len(cells), most)]


def rollouts_of(chain: Sequence[Cell]) -> list[int]:
    """The rollout in which each cell of a chain is struck; -1 for the start and the end."""
    count, found = itertools.count(), []
    for cell in chain:
        middle = cell.phase in MIDDLE
        found.append(FIRST + MODES[cell.mode].apart * next(count) if middle else -1)
    return found


def steps_of(chain: Sequence[Cell]) -> int:
    return max(rollouts_of(chain)) + MODES[chain[0].mode].apart + 1 if max(rollouts_of(chain)) >= 0 else 3


# --- one run -------------------------------------------------------------------------------------


@dataclass
class Work:
    """The folder with the model and the data of all runs."""

    folder: Path

    def prepare(self) -> None:
        if not (self.folder / "model").exists():
            write_model("tiny", self.folder / "model")
        for name, word in (("prompts", "Write"), ("evaluation", EVALUATED)):
            rows = [{"prompt": f"{word} the letter {'abcd'[i % 4]}.", "label": "abcd"[i % 4]} for i in range(16)]
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

    def __init__(self, work: Work, chain: Sequence[Cell], mode: str, steps: int, deadline: float) -> None:
        self.chain, self.mode, self.deadline = chain, MODES[mode], deadline
        self.mark = uuid.uuid4().hex
        self.name = self.mark[:8]
        self.cwd = work.folder / "runs" / self.name
        self.out = self.cwd / "outputs" / "run"
        self.found = [Found("not reached") for _ in chain]
        self.pids: set[int] = set()
        self.cwd.mkdir(parents=True)
        plan = [(cell.phase, rollout) for cell, rollout in zip(chain, rollouts_of(chain), strict=True)]
        (self.cwd / "plan.json").write_text(json.dumps(plan))
        # A folder of its own, in which only this run can have left something. Its path is short, for sockets.
        self.temporary = Path(tempfile.mkdtemp(prefix="strike-"))
        self.shared_before = shared_memory()
        path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]))
        own = {MARK: self.mark, FOLDER: str(self.cwd), "PYTHONPATH": path, "TMPDIR": str(self.temporary)}
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
        """Strike one cell after the other, and wait after each until the run has gone on or ended."""
        for number, (cell, rollout) in enumerate(zip(self.chain, rollouts_of(self.chain), strict=True)):
            restarts = self._restarts()
            if not self._strike(number, cell):
                return
            since, size = time.monotonic(), len(self.output())
            # The step after the struck one: the row of the struck one may come from the snapshot.
            done = self._over if cell.phase == "end" else lambda rollout=rollout: self.last_step() > rollout
            reached = self._wait(lambda done=done: done() or self._over(), self.deadline)
            found = self.found[number] = Found("hung" if not reached else "went on", time.monotonic() - since)
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
        """Wait until the run is in the phase and send the signal; False if the run ended or hung before."""
        reached = self.cwd / f"reached-{number}"

        def ready() -> bool:
            if cell.phase == "start":
                return bool(of_role(self.mark, cell.target)) and self.out.exists()
            return reached.exists() and bool(reached.read_text())

        if not self._wait(lambda: ready() or self._over(), self.deadline) or not ready():
            self.found[number].message = last_words(self.output())
            return False
        if cell.phase == "start":
            time.sleep(START_SECONDS)
        victims = of_role(self.mark, cell.target)
        holder = int(reached.read_text()) if cell.phase != "start" else 0
        chosen = [process for process in victims if process.pid == holder] or victims[-1:]
        self.pids |= {process.pid for process in alive(self.mark)}
        for process in chosen:
            process.send_signal(signal.Signals[cell.signal])
        (self.cwd / f"struck-{number}").touch()
        self.found[number].message = "" if chosen else f"there was no {cell.target}"
        return bool(chosen)

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

    def close(self) -> list[str]:
        """End what is left of the run; returns what it had left behind after its own end."""
        over = self._over()
        until = time.monotonic() + GONE_SECONDS
        while over and alive(self.mark) and time.monotonic() < until:
            time.sleep(0.2)
        left = [f"process {' '.join(command_line(process))[:100]}" for process in alive(self.mark)] if over else []
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
            left += [f"shared memory {name}" for name in self._own(shared_memory() - self.shared_before)]
            # Ray keeps the folder of a session, with its logs and dead sockets, and torch its compiled kernels.
            left += [one.name for one in self.temporary.iterdir() if not one.name.startswith(("ray", "torchinductor"))]
        shutil.rmtree(self.temporary, ignore_errors=True)
        return left

    def _own(self, names: Iterable[str]) -> list[str]:
        """Those that this run made: other runs of this machine have names with other process ids."""
        numbers = {name: {int(word) for word in re.findall(r"\d+", name)} for name in names}
        return sorted(name for name, words in numbers.items() if words & self.pids or name.startswith("sglang_loads"))


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def last_words(output: str, lines: int = 6) -> str:
    """The end of an output, without the frames of tracebacks."""
    return " | ".join([line.strip() for line in output.splitlines() if line.strip()][-lines:])[-1200:]


# --- what a run left ------------------------------------------------------------------------------


def steps_in(run: Path) -> dict[int, dict[str, Any]]:
    """The complete rows of ``metrics.jsonl`` that stand for steps, by rollout."""
    found = {}
    with contextlib.suppress(OSError):
        for line in (run / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if "rollout/step" in row:
                    found[int(row["rollout/step"])] = row
    return found


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    """What training did: rewards, losses, gaps; not the clock, nor what the faults were."""
    leave = ("perf/", "time", "memory/", "rollout/engine_", "rollout/http_", "rollout/router_", "rollout/buffered")
    gone = ("cache", "under_way", "_time", "weight_version", "staleness")
    return {k: v for k, v in row.items() if not k.startswith(leave) and not any(word in k for word in gone)}


def differences(run: Path, reference: Path) -> list[str]:
    """The steps and values in which a run differs from an undisturbed one, as far as both went."""
    ours, theirs = steps_in(run), steps_in(reference)
    found = [f"step {step} is missing" for step in range(max(ours, default=-1)) if step not in ours]
    for step in sorted(ours.keys() & theirs.keys()):
        one, two = numbers(ours[step]), numbers(theirs[step])
        found += [f"step {step}: {key}" for key in sorted({*one, *two}) if one.get(key) != two.get(key)]
    weights, right = read_weights(run / "weights.jsonl"), read_weights(reference / "weights.jsonl")
    both = weights.keys() & right.keys()
    found += [f"weights after {step} steps" for step in sorted(both) if weights[step].digest != right[step].digest]
    return found if both else [*found, "no digests of weights"]


def judge(run: StruckRun, left: list[str], reference: Path) -> bool:
    """Complete what was found of each cell; returns whether the end of the run is as promised."""
    try:
        problems = read_ledger(run.out / "ledger.jsonl").problems
    except FileNotFoundError:
        problems = ["there is no ledger"]
    closes = not problems or run.last_step() < 0  # a run that ended before its first step has no account
    unlike = differences(run.out, reference)
    faults = problems[:3] if not closes else []
    faults += [f"left behind: {', '.join(left)}"] if left else []
    promised = all(cell.target not in run.mode.differ for cell in run.chain)
    faults += [f"differs: {', '.join(unlike[:6])}"] if unlike and promised and run.last_step() >= 0 else []
    for cell, found in zip(run.chain, run.found, strict=True):
        found.account, found.left = closes, left
        found.equal = not unlike if promised and run.last_step() >= 0 else None
        fits = found.outcome in ("went on", "restarted") or (found.outcome == "ended" and clear(found.message, cell))
        found.ok = fits and not faults
        if fits and faults:
            found.message = "; ".join(faults)
    return not faults


def clear(message: str, cell: Cell) -> bool:
    """Whether the last lines of a run that ended say what was lost or what to do."""
    return bool(re.search(r"\blost\b|did not (answer|start)|died|--load|logs of all processes", message))


# --- the campaign ---------------------------------------------------------------------------------


@dataclass
class Campaign:
    work: Work
    output: Path
    deadline: float

    def reference(self, mode: str, steps: int) -> Path:
        """The folder of an undisturbed run of at least so many steps, which is made when it is first needed."""
        kept = self.work.folder / "references" / mode.replace(" ", "-")
        if len(steps_in(kept)) >= steps:
            return kept
        run = StruckRun(self.work, [], mode, steps, self.deadline)
        try:
            run._wait(run._over, self.deadline)
        finally:
            left = run.close()
        if run.process.returncode != 0 or left:
            raise SystemExit(f"the undisturbed run of {mode} failed ({left}):\n{run.output()[-3000:]}")
        kept.parent.mkdir(exist_ok=True)
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(run.out, kept)
        return kept

    def strike(self, chain: Sequence[Cell]) -> None:
        """Strike a chain and write what came of its cells; those that it leaves open are struck alone."""
        mode = chain[0].mode
        # All chains of a mode are compared with one run: how long a run is changes nothing in its steps.
        reference = self.reference(mode, max(steps_of(chain), FIRST + 6 * MODES[mode].apart))
        run = StruckRun(self.work, chain, mode, steps_of(chain), self.deadline)
        try:
            run.strike_all()
        finally:
            left = run.close()
        sound = judge(run, left, reference)
        again: list[Cell] = []
        for cell, found in zip(chain, run.found, strict=True):
            alone = len(chain) == 1
            decided = found.outcome != "not reached" and (sound or found.outcome in ("ended", "hung"))
            if alone or decided:
                self.write(cell, found, chain)
            else:
                again.append(cell)
        if all(found.ok for found in run.found):
            shutil.rmtree(run.cwd)
        else:
            print(f"kept: {run.cwd}", flush=True)
        for cell in again:
            self.strike([cell])

    def write(self, cell: Cell, found: Found, chain: Sequence[Cell] = ()) -> None:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=CHECKOUT, capture_output=True, text=True
        ).stdout.strip()
        others = [other.place for other in chain if other != cell]
        found.seconds = round(found.seconds, 1)
        line = {**asdict(cell), **asdict(found), "chain": others, "date": time.strftime("%Y-%m-%d"), "commit": commit}
        with self.output.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def read_results(path: Path) -> dict[Cell, dict[str, Any]]:
    """The last line of each cell."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        values = json.loads(line)
        found[Cell(*(values[name] for name in ("mode", "target", "phase", "signal")))] = values
    return found


def table(results: dict[Cell, dict[str, Any]]) -> str:
    """Markdown: for each mode and signal a table of targets and phases."""
    lines = []
    dates = sorted({values["date"] for values in results.values()})
    commits = sorted({values["commit"] for values in results.values()})
    counted = [values for values in results.values() if values["outcome"] != "absent"]
    lines.append(
        f"Struck on {' and '.join(dates)} at {', '.join(commits)}: {len(counted)} cells, "
        f"{sum(values['ok'] for values in counted)} as promised."
    )
    for mode, number in dict.fromkeys((cell.mode, cell.signal) for cell in all_cells()):
        these = {cell: v for cell, v in results.items() if (cell.mode, cell.signal) == (mode, number)}
        if not any(values["outcome"] != "absent" for values in these.values()):
            continue
        lines += ["", f"{mode}, {number}:", "", f"| target | {' | '.join(PHASES)} |", "|---" * (len(PHASES) + 1) + "|"]
        for target in TARGETS:
            row = [shown(these.get(Cell(mode, target, phase, number))) for phase in PHASES]
            if set(row) - {"–", ""}:
                lines.append(f"| {target} | {' | '.join(row)} |")
    return "\n".join(lines)


def shown(values: dict[str, Any] | None) -> str:
    if values is None:
        return ""
    if values["outcome"] == "absent":
        return "–"
    told = f"{values['outcome']} {values['seconds']:.0f} s"
    if values["ok"]:
        return told
    fault = "" if values["outcome"] in ("hung", "not reached", "ended") else f": {values['message'].partition(':')[0]}"
    return f"**{told}{fault}**"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=CHECKOUT / "benchmarks" / "results" / "strikes.jsonl")
    parser.add_argument("--work", type=Path, default=CHECKOUT / "outputs" / "benchmarks" / "strikes")
    parser.add_argument("--mode", choices=MODES, action="append", help="default: all; may be given several times")
    parser.add_argument("--only", action="append", help="target:phase:signal, each a name or a pattern such as *")
    parser.add_argument("--sample", type=int, help="so many cells, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chain", type=int, default=5, help="most cells of the middle of one run (default: 5)")
    parser.add_argument("--runs", type=int, help="stop after so many chains")
    parser.add_argument("--deadline", type=float, default=180.0, help="seconds without a step (default: 180)")
    parser.add_argument("--table", action="store_true", help="print the table of --output, strike nothing")
    return parser.parse_args()


def chosen(options: argparse.Namespace, known: Iterable[Cell]) -> list[Cell]:
    """The cells that are asked for and not in the output file yet."""
    cells = [cell for cell in all_cells() if not options.mode or cell.mode in options.mode]
    if options.only:
        cells = [cell for cell in cells if any(fnmatch.fnmatchcase(cell.place, only) for only in options.only)]
    if options.sample is not None:
        drawn = set(random.Random(options.seed).sample(cells, min(options.sample, len(cells))))
        cells = [cell for cell in cells if cell in drawn]
    done = set(known)
    return [cell for cell in cells if cell not in done]


def main() -> int:
    options = parse()
    if options.table:
        print(table(read_results(options.output)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run in progress is ended
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(Work(options.work), options.output, options.deadline)
    campaign.work.prepare()
    cells = chosen(options, read_results(options.output))
    for cell in cells:
        if reason := absent(cell):
            campaign.write(cell, Found("absent", account=True, message=reason, ok=True))
    for chain in chains([cell for cell in cells if not absent(cell)], options.chain)[: options.runs]:
        campaign.strike(chain)
    results = read_results(options.output)
    return 0 if all(results[cell]["ok"] for cell in cells if cell in results) else 1


if __name__ == "__main__":
    sys.exit(main())
