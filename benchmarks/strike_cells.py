"""The cells of the campaign of strikes, and the runs that they are struck in."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from run_processes import ROLES

CHECKOUT = Path(__file__).resolve().parents[1]
MEGATRON_SITE = CHECKOUT / "tests" / "plugins" / "megatron" / "cpu_site"
HOOKS = CHECKOUT / "benchmarks" / "strike_hooks.py"
TARGETS = tuple(ROLES)
MIDDLE = ("generate", "reward", "train", "sync", "evaluation", "save")
PHASES = ("start", *MIDDLE, "end")
SIGNALS = ("SIGKILL", "SIGSTOP")
ABSENT = {("verifier", "start"): "verifiers start with the first judgement"}
NO_WORKER = (
    "only the mode of this name has rollout workers: in the others the rollout manager generates"
)
WORKERS = "rollout workers"
FIRST = 1  # the rollout of the first strike
FROZEN = {
    "engine actor": 1,
    "verifier": 1,
    "worker": 2,
    "router": 2,
    "engine": 3,
    "rank": 3,
    "driver": 3,
    "manager": 4,
}
"""How long it takes, beside other strikes, until a process of this role that froze was replaced."""
UNWATCHED = 5  # a frozen raylet or GCS


@dataclass(frozen=True)
class Mode:
    """How the struck runs train.

    Attributes:
        apart: Steps between two strikes of a run.
        differ: Targets after whose loss the mode does not promise the numbers of an undisturbed
            run.
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
        ("--async-buffer-size", 2, "--rollout-function-path", _FULLY),
        "train_async.py",
        5,
        frozenset(TARGETS),
    ),
    "Megatron TP2": Mode(
        (
            *_TWO_RANKS,
            "--tensor-model-parallel-size",
            2,
            "--train-backend",
            "megatron",
            "--train-env-vars",
            _MEGATRON,
        )
    ),
    # The hook of the generate function arms the end in the rollout manager, which generates nothing
    # here.
    WORKERS: Mode(
        ("--rollout-workers", 2, "--custom-rollout-log-function-path", f"{HOOKS}:in_manager")
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
        equal: Whether the numbers are those of an undisturbed run; None where the mode does not
            promise it.
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
    return [Cell(*parts) for parts in itertools.product(MODES, TARGETS, PHASES, SIGNALS)]


def absent(cell: Cell) -> str:
    """Why there is no such process; empty if there is one."""
    return (
        NO_WORKER
        if cell.target == "worker" and cell.mode != WORKERS
        else ABSENT.get((cell.target, cell.phase), "")
    )


def price(cell: Cell) -> int:
    """How long a strike takes beside others: a killed process is noticed at once, a frozen one
    after its deadline.
    """
    return 1 if cell.signal == "SIGKILL" else FROZEN.get(cell.target, UNWATCHED)


def chains(cells: Sequence[Cell], most: int) -> list[list[Cell]]:
    """Runs of one mode with cells of any phases and signals: at most ``most`` of the middle, a
    start and an end.

    The cells of one target are spread over the runs of their mode, since an engine that is lost
    five times in ten minutes is given up. A frozen raylet or GCS comes last: nothing replaces it
    before the others are struck.
    """
    made: list[list[Cell]] = []
    for mode in dict.fromkeys(cell.mode for cell in cells):
        same = [cell for cell in cells if cell.mode == mode]
        middle = sorted(
            (cell for cell in same if cell.phase in MIDDLE), key=lambda cell: cell.target
        )
        starts, ends = (
            [cell for cell in same if cell.phase == phase] for phase in ("start", "end")
        )
        count = max(-(-len(middle) // most), len(starts), len(ends))
        for number in range(count):
            part = sorted(
                middle[number::count],
                key=lambda cell: (price(cell) == UNWATCHED, PHASES.index(cell.phase)),
            )
            made.append([*starts[number : number + 1], *part, *ends[number : number + 1]])
    return made


def rollouts_of(chain: Sequence[Cell]) -> list[int]:
    """The rollout in which each cell of a chain is struck; -1 for the start and the end."""
    count, found = itertools.count(), []
    for cell in chain:
        middle = cell.phase in MIDDLE
        found.append(FIRST + MODES[cell.mode].apart * next(count) if middle else -1)
    return found


def steps_of(chain: Sequence[Cell]) -> int:
    return (
        max(rollouts_of(chain)) + MODES[chain[0].mode].apart + 1
        if max(rollouts_of(chain)) >= 0
        else 3
    )
