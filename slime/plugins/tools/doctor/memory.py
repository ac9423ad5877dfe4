"""The memory of a run by phase, as evidence for one that has run out of it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slime.plugins.tools.doctor.facts import Facts

COLUMNS = ("tensors", "reserved", "device", "process")
"""Of :func:`slime.observability.profiler.memory_in_use`."""
_NAME = re.compile(r"memory/(?P<phase>[^/]+)/(?P<role>critic_)?(?P<what>tensors|reserved|device|process)")
_ASKED = re.compile(r"Tried to allocate ([\d.]+ [KMGT]iB)")
_SAID = (
    ("the GPU has", re.compile(r"total capacity of ([\d.]+ [KMGT]iB)")),
    ("free on it", re.compile(r"of which ([\d.]+ [KMGT]iB) is free")),
    ("in PyTorch's tensors", re.compile(r"([\d.]+ [KMGT]iB) is allocated by PyTorch")),
    ("reserved and not used by PyTorch", re.compile(r"([\d.]+ [KMGT]iB) is reserved by PyTorch but unallocated")),
)


def memory_table(facts: Facts, error: str) -> tuple[str, ...]:
    """Return the numbers of PyTorch's message, and the table of the memory after each phase.

    Args:
        error: The message; without numbers, only the table is returned.
    """
    return (*_message(error), *_table(facts))


def _message(error: str) -> Iterator[str]:
    asked = _ASKED.search(error)
    if asked is None:
        return
    said = [f"{what}: {found[1]}" for what, pattern in _SAID if (found := pattern.search(error)) is not None]
    yield f"it asked for {asked[1]}" + (f" ({'; '.join(said)})" if said else "")


def _table(facts: Facts) -> Iterator[str]:
    """Yield a row for each phase: the last values, and the largest memory of the device in the whole run."""
    rows: dict[str, dict[str, float]] = {}
    most: dict[str, float] = {}
    last: float | None = None
    for step in facts.steps:
        for name, value in step.items():
            found = _NAME.fullmatch(name)
            if found is None or value is None:
                continue
            phase = found["phase"] + (" (critic)" if found["role"] else "")
            last = step.get("rollout/step")
            rows.setdefault(phase, {})[found["what"]] = value
            if found["what"] == "device":
                most[phase] = max(most.get(phase, 0.0), value)
    if not rows:
        yield (
            "no memory by phase was recorded: only runs whose trainer and engines share GPUs log it; "
            "slime plan predicts it, --record-memory-history records every allocation"
        )
        return
    shown = [name for name in COLUMNS if any(name in row for row in rows.values())]
    step_text = "?" if last is None else f"{last:.0f}"
    yield f"GiB after each phase, step {step_text}".ljust(36) + "".join(f"{name:>10}" for name in shown) + "  most"
    for phase, row in rows.items():
        cells = "".join(f"{row[name]:>10.1f}" if name in row else f"{'':>10}" for name in shown)
        yield f"  {phase:<34}{cells}" + (f"{most[phase]:>6.1f}" if phase in most else "")
