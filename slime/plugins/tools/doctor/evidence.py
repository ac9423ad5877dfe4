"""Evidence that is looked up for findings: what the processes of a run do at the moment (by py-spy,
where it is installed), its memory by phase, and which tokens the trainer and the engines disagree
about (from its dumps)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..summary import find_dump
from .facts import Facts

SECONDS = 10.0
_FRAMES = 4
_FRAME = re.compile(r"^ {4}(\S.*) \(([^()]+)\)$", re.MULTILINE)
_OF_RAY = ("raylet", "gcs_server", "/ray/dashboard/", "/ray/_private/", "runtime_env/agent")
"""Words in the command lines of Ray's own servers, which say nothing about the run."""


def find_py_spy() -> str | None:
    """Return the path of py-spy; None if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if beside.is_file() else None)


def stacks(processes: Sequence[tuple[int, str]]) -> list[str]:
    """Return a line for each Python process that can be looked into: its innermost frames, the
    innermost first.

    The processes are not paused for it.

    Args:
        processes: Process ids and names.
    """
    # It is an extra: without it, the finding still names the wait.
    program = find_py_spy()
    if program is None:
        return [
            "py-spy is not installed (pip install py-spy): the stacks of the processes are not "
            "shown"
        ]
    lines = []
    for pid, name in processes:
        if any(word in name for word in _OF_RAY):
            continue
        frames = _main_thread(_dump(program, pid), pid)
        if frames:
            lines.append(f"pid {pid} ({name[:40]}): {' < '.join(frames)}")
    return lines or [
        "py-spy can read no process of the run: it needs the same user, and CAP_SYS_PTRACE in a "
        "container"
    ]


def _dump(program: str, pid: int) -> str:
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _main_thread(dump: str, pid: int) -> list[str]:
    """Return the frames of the main thread, and the innermost one of slime if it lies deeper in the
    stack.
    """
    # py-spy lists all threads; the main one runs the step.
    threads = re.split(r"^(?=Thread )", dump, flags=re.MULTILINE)
    # Its thread id is that of the process; its name is known only where threading was imported.
    main = next((one for one in threads if one.startswith(f"Thread {pid} ")), "")
    frames = [f"{function} ({where})" for function, where in _FRAME.findall(main)]
    shown = frames[:_FRAMES]
    own = next((frame for frame in frames[_FRAMES:] if "slime/" in frame), None)
    return [*shown, "...", own] if own is not None else shown


COLUMNS = ("tensors", "reserved", "device", "process")
"""Of :func:`slime.observability.profiler.memory_in_use`."""
_MEMORY = re.compile(
    r"memory/(?P<phase>[^/]+)/(?P<role>critic_)?(?P<what>tensors|reserved|device|process)"
)
_ASKED = re.compile(r"Tried to allocate ([\d.]+ [KMGT]iB)")
_SAID = (
    ("the GPU has", re.compile(r"total capacity of ([\d.]+ [KMGT]iB)")),
    ("free on it", re.compile(r"of which ([\d.]+ [KMGT]iB) is free")),
    ("in PyTorch's tensors", re.compile(r"([\d.]+ [KMGT]iB) is allocated by PyTorch")),
    (
        "reserved and not used by PyTorch",
        re.compile(r"([\d.]+ [KMGT]iB) is reserved by PyTorch but unallocated"),
    ),
)


def memory_table(facts: Facts, error: str) -> tuple[str, ...]:
    """Return the numbers of PyTorch's message, and the table of the memory after each phase.

    Args:
        error: The message; without numbers, only the table is returned.
    """
    return (*_of_message(error), *_rows_of_phases(facts))


def _of_message(error: str) -> Iterator[str]:
    asked = _ASKED.search(error)
    if asked is None:
        return
    said = [
        f"{what}: {match[1]}"
        for what, pattern in _SAID
        if (match := pattern.search(error)) is not None
    ]
    yield f"it asked for {asked[1]}" + (f" ({'; '.join(said)})" if said else "")


def _rows_of_phases(facts: Facts) -> Iterator[str]:
    """Yield a row for each phase: the last values, and the largest memory of the device in the
    whole run.
    """
    rows: dict[str, dict[str, float]] = {}
    most: dict[str, float] = {}
    last: float | None = None
    # The last value of each phase, and the largest memory of the device in the whole run.
    for step in facts.steps:
        for name, value in step.items():
            match = _MEMORY.fullmatch(name)
            if match is None or value is None:
                continue
            phase = match["phase"] + (" (critic)" if match["role"] else "")
            last = step.get("rollout/step")
            rows.setdefault(phase, {})[match["what"]] = value
            if match["what"] == "device":
                most[phase] = max(most.get(phase, 0.0), value)
    if not rows:
        yield (
            "no memory by phase was recorded: only runs whose trainer and engines share GPUs log "
            "it; slime plan predicts it, --record-memory-history records every allocation"
        )
        return
    shown = [name for name in COLUMNS if any(name in row for row in rows.values())]
    step_text = "?" if last is None else f"{last:.0f}"
    yield (
        f"GiB after each phase, step {step_text}".ljust(36)
        + "".join(f"{name:>10}" for name in shown)
        + "  most"
    )
    for phase, row in rows.items():
        cells = "".join(f"{row[name]:>10.1f}" if name in row else f"{'':>10}" for name in shown)
        yield f"  {phase:<34}{cells}" + (f"{most[phase]:>6.1f}" if phase in most else "")


LARGE = 1.0
"""A gap above this is an outlier: the token is e times as likely for one side as for the other."""
MOST = 5
_SHARE = 0.8
_MOST_BYTES = 2**30
NOT_RECORDED = (
    "which tokens is not recorded: --dump-details FOLDER records them, with "
    "--num-steps-per-rollout 2 or more (or --get-mismatch-metrics and a "
    "--custom-tis-function-path) also the trainer's log-probs"
)


@dataclass(frozen=True)
class Outlier:
    """A token with a large gap.

    Attributes:
        sample: Its ``Sample.index``.
        position: In the response, from 0.
        last: Whether it is the last token of the response.
    """

    sample: int
    position: int
    token: int
    engine: float
    trainer: float
    last: bool

    @property
    def gap(self) -> float:
        return abs(self.engine - self.trainer)


def worst_tokens(facts: Facts, metric: str) -> tuple[str, ...]:
    """Return lines about the outliers of the recorded step in which ``metric`` was largest."""
    template = facts.settings.get("save_debug_train_data")
    steps = sorted(
        (row for row in facts.steps if row.get(metric)), key=lambda row: -(row[metric] or 0.0)
    )
    # The step with the largest gap may have no dump, so the next ones are looked for.
    for row in steps:
        number = int(row.get("rollout/step") or 0)
        path = find_dump(template, facts.folder, facts.settings.get("run_name"), number)
        if path is not None and path.stat().st_size <= _MOST_BYTES:
            lines = tuple(_described(_read_samples(path), number))
            return lines or (NOT_RECORDED,)
    return (NOT_RECORDED,)


def _read_samples(path: Path) -> list[Mapping[str, Any]]:
    from slime.data.plain_values import load_plain

    try:
        samples = load_plain(path)["samples"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [sample for sample in samples if "log_probs" in sample and "rollout_log_probs" in sample]


def _described(samples: Sequence[Mapping[str, Any]], step: int) -> Iterator[str]:
    all_outliers = []
    trained = 0
    for sample in samples:
        outliers, tokens = _outliers(sample)
        all_outliers += outliers
        trained += tokens
    if not samples:
        return
    of_sample = Counter(one.sample for one in all_outliers)
    yield (
        f"step {step}: {len(all_outliers)} of {trained} trained tokens differ by more than {LARGE:g}, "
        f"in {len(of_sample)} of {len(samples)} samples"
    )
    for one in sorted(all_outliers, key=lambda one: -one.gap)[:MOST]:
        yield (
            f"sample {one.sample}, token {one.position}{' (the last)' if one.last else ''}, id "
            f"{one.token}: engine {one.engine:.3f}, trainer {one.trainer:.3f}; slime ui shows it"
        )
    if len(all_outliers) >= MOST:
        yield from _pattern(all_outliers, of_sample)


def _outliers(sample: Mapping[str, Any]) -> tuple[list[Outlier], int]:
    ids = sample["tokens"].tolist()
    mask = sample["loss_masks"].tolist()
    # A NaN is an outlier, too.
    both = zip(
        sample["rollout_log_probs"].tolist(), sample["log_probs"].tolist(), mask, strict=True
    )
    first = len(ids) - len(mask)
    end = len(mask) - 1
    outliers = [
        Outlier(int(sample["sample_indices"]), at, ids[first + at], engine, trainer, at == end)
        for at, (engine, trainer, trains) in enumerate(both)
        if trains and not abs(engine - trainer) <= LARGE
    ]
    return outliers, sum(mask)


def _pattern(found: Sequence[Outlier], of_sample: Counter[int]) -> Iterator[str]:
    """Say what most outliers have in common."""
    rules: Sequence[tuple[str, Callable[[Outlier], bool]]] = (
        ("the last token of a response: look at end tokens and stop strings", lambda one: one.last),
        ("the first token of a response: look at the prompt of both sides", lambda one: not one.position),
    )  # fmt: skip
    for text, holds in rules:
        if sum(map(holds, found)) >= _SHARE * len(found):
            yield f"most of them are {text}"
    # One token or one sample alone points to its special meaning.
    token, times = Counter(one.token for one in found).most_common(1)[0]
    if times >= _SHARE * len(found):
        yield (
            f"most of them have the id {token}: a special token, or one that a sampling mask of "
            "one side excludes"
        )
    sample, times = of_sample.most_common(1)[0]
    if len(of_sample) > 1 and times >= _SHARE * len(found):
        yield (
            f"most of them are in sample {sample}: its tokens or its media differ between both "
            "sides"
        )
