"""The flight recorder of PyTorch's collective operations: which rank is behind, and in which
operation.

A rank that waits too long writes its last operations to ``logs/flight_recorder_<role>_rank_<rank>``
(a pickle; see PyTorch's "Flight Recorder for Debugging Stuck Jobs"). Reading it runs no code of the
file.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .facts import DUMPS, Facts, Finding, is_inside

_NAME = re.compile(DUMPS + r"(\w+?)_rank_(\d+)")
MOST_BYTES = 64 * 2**20
_MOST_SHOWN = 8


class _ValuesOnly(pickle.Unpickler):
    """Reads dicts, lists, numbers and texts; a file that names a class or a function is refused."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(
            f"the dump refers to {module}.{name}: only plain values are read"
        )


@dataclass(frozen=True)
class Operation:
    """A collective operation that a rank has begun.

    Attributes:
        number: Its number in its process group, from 1.
        what: Such as ``nccl:all_reduce``.
        sizes: The sizes of its inputs.
        done: Whether the rank has seen its end.
        where: File, line and function of the innermost frame that is not PyTorch's.
    """

    number: int
    what: str
    sizes: str
    done: bool
    where: str


@dataclass(frozen=True)
class Recording:
    """The dump of a rank: its operations by process group, oldest first, and the members of each
    group.
    """

    operations: Mapping[str, Sequence[Operation]]
    members: Mapping[str, Sequence[int]]


def read_recordings(folder: Path, newer_than: float = 0.0) -> dict[str, dict[int, Recording]]:
    """Return the dumps in the folder of the logs by role and rank; files that are no dumps, or that
    a link has elsewhere, are left out.

    Args:
        newer_than: Wall time in seconds. Older files are of a trouble that the run has survived.
    """
    recordings: dict[str, dict[int, Recording]] = {}
    for path in sorted(folder.glob(f"{DUMPS}*_rank_*")):
        match = _NAME.fullmatch(path.name)
        if match is None or not is_inside(path, folder.parent):
            continue
        try:
            status = path.stat()
            if status.st_mtime < newer_than or status.st_size > MOST_BYTES:
                continue
            dump = _ValuesOnly(io.BytesIO(path.read_bytes())).load()
            recordings.setdefault(match[1], {})[int(match[2])] = _recording(dump)
        # A rank that was killed while it wrote leaves a part of a pickle, which may fail in many
        # ways.
        except (
            OSError,
            pickle.UnpicklingError,
            EOFError,
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            AttributeError,
        ):
            continue
    return recordings


def _recording(dump: Mapping[str, Any]) -> Recording:
    operations: dict[str, list[Operation]] = {}
    for entry in dump["entries"]:
        if entry.get("is_p2p"):
            continue
        # An operation that has left the ring of the recorder is over.
        done = entry.get("state") == "completed" or bool(entry.get("retired"))
        sizes = "x".join(map(str, entry["input_sizes"][0])) if entry.get("input_sizes") else ""
        one = Operation(
            entry["collective_seq_id"], str(entry["profiling_name"]), sizes, done, _where(entry)
        )
        operations.setdefault(str(entry["process_group"][0]), []).append(one)
    members = {}
    for name, group in (dump.get("pg_config") or {}).items():
        members[str(name or "0")] = [
            int(rank) for rank in re.findall(r"\d+", str(group.get("ranks", "")))
        ]
    return Recording(
        {name: sorted(some, key=lambda one: one.number) for name, some in operations.items()},
        members,
    )


def _where(entry: Mapping[str, Any]) -> str:
    frames = entry.get("frames") or []
    own = next((frame for frame in frames if "/torch/" not in str(frame["filename"])), None)
    return f"{own['filename']}:{own['line']}, in {own['name']}" if own else ""


def collectives(facts: Facts) -> Iterator[Finding]:
    """A rank that is behind the others in a collective operation, or that calls another one."""
    if facts.state is None or facts.state.status in ("completed", "stopped"):
        return
    # Dumps from before the last complete step are of a trouble that is over.
    trained = facts.series("time")
    since = trained[-1] if trained else 0.0
    recordings = read_recordings(facts.folder / "logs", since)
    for role, ranks in recordings.items():
        groups = sorted({name for one in ranks.values() for name in one.operations})
        finding = next(
            (found for name in groups if (found := _compare(role, name, ranks)) is not None), None
        )
        if finding is not None:
            yield finding
            return


def _compare(role: str, group: str, ranks: Mapping[int, Recording]) -> Finding | None:
    """Return what is wrong in a process group; None if every operation that a rank has begun is
    complete.
    """
    # The first operation that some rank has begun and not ended, and the ranks that belong to its
    # group.
    begun = {rank: one.operations.get(group, ()) for rank, one in ranks.items()}
    members = set().union(*(one.members.get(group, ()) for one in ranks.values())) or set(ranks)
    begun = {rank: some for rank, some in begun.items() if rank in members}
    waiting = [
        (one.number, rank, one) for rank, some in begun.items() for one in some if not one.done
    ]
    if not waiting:
        return None
    number, asking, operation = min(waiting, key=lambda entry: entry[:2])
    # Who has begun it, who is behind, and who left no record.
    there = {rank: one for rank, some in begun.items() for one in some if one.number == number}
    last = {rank: some[-1].number if some else 0 for rank, some in begun.items()}
    behind = sorted(rank for rank in members if rank in begun and last[rank] < number)
    silent = sorted(members - set(ranks))
    kinds = {(one.what, one.sizes) for one in there.values()}
    name = f"operation {number} ({operation.what}) of process group {group}"
    shown = tuple(_line(rank, begun[rank][-1] if begun[rank] else None) for rank in sorted(begun))[
        :_MOST_SHOWN
    ]
    # The order is that of causes: a rank that never came, ranks that called something else, a rank
    # that is gone.
    if behind:
        return Finding(
            "rank_behind",
            f"{_ranks(role, behind)} did not begin {name}, for which rank {asking} waits.",
            shown,
            "Look at the end of the log of that rank, and at its stack (py-spy dump --pid PID): "
            "it does something else, such as a longer batch, or an error that it has not "
            "reported.",
        )
    if len(kinds) > 1:
        different = tuple(_line(rank, one) for rank, one in sorted(there.items()))[:_MOST_SHOWN]
        return Finding(
            "collective_mismatch",
            f"The ranks of the {role} call different operations as {name[: name.index(' (')]}.",
            different,
            "The lines name where each rank was: a branch depends on data that differs between "
            "ranks, such as the number of micro-batches.",
        )
    if silent:
        return Finding(
            "rank_silent",
            f"{_ranks(role, silent)} left no record; rank {asking} waits in {name}.",
            shown,
            "It died, or its machine was lost: look at the end of its log.",
        )
    return Finding(
        "collective_stuck",
        f"All ranks of the {role} have begun {name}, and none has seen its end.",
        shown,
        "The GPUs or the network between them fail: NCCL_DEBUG=INFO names the connection, dmesg "
        "has Xid lines.",
    )


def _line(rank: int, operation: Operation | None) -> str:
    if operation is None:
        return f"rank {rank}: no operation yet"
    state = "done" if operation.done else "not done"
    where = f", {operation.where}" if operation.where else ""
    return (
        f"rank {rank}: last {operation.number} {operation.what} [{operation.sizes}], {state}{where}"
    )


def _ranks(role: str, ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MOST_SHOWN]))
    return f"Rank{'s' if len(ranks) > 1 else ''} {shown} of the {role}"
