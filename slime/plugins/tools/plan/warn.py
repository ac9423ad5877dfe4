"""Whether a run will fit on the GPUs of this machine, for ``--dry-run`` and the start of a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from .gpus import GIB, KINDS, GpuKind
from .plan import make_plan
from .read import read_run

if TYPE_CHECKING:
    from slime.config.args import Args

_DRIVER = Path("/proc/driver/nvidia/gpus")


def kind_by_name(name: str) -> GpuKind | None:
    """Return the kind by the driver's name of a GPU (``NVIDIA A100-SXM4-80GB``); None if it is not known."""
    words = re.split(r"[\s-]+", name.lower())
    if "a100" in words:
        return KINDS["a100-40gb" if "40gb" in words else "a100"]
    return next((kind for word in words if (kind := KINDS.get(word)) is not None), None)


def installed_kind(folder: Path = _DRIVER) -> GpuKind | None:
    """Return the kind of this machine's first GPU, without torch; None if there is none, or if it is not known."""
    for file in sorted(folder.glob("*/information")):
        found = re.search(r"^Model:\s*(.+)$", file.read_text(errors="replace"), re.MULTILINE)
        return kind_by_name(found.group(1)) if found else None
    return None


def misfits(args: Args, asynchronous: bool = False, kind: GpuKind | None = None) -> list[str]:
    """Say why a run may not fit on GPUs of a kind, by default this machine's. Empty if it fits, or if it is not known.

    It is not an error, because the estimate can be wrong by a tenth and does not include users' functions. The embedded
    engine sizes its cache by the memory that is free, so a run with it is not judged.
    """
    kind = kind or installed_kind()
    if kind is None or (args.rollout_backend == "embedded" and not args.debug_train_only):
        return []
    run = read_run(args, kind, asynchronous)
    return list(make_plan(run).problems) if run is not None else []


def report(args: Args, asynchronous: bool = False, kind: GpuKind | None = None) -> list[str]:
    """The memory of each phase of a step on GPUs of a kind, by default this machine's, and why the run does not fit."""
    kind = kind or installed_kind()
    if kind is None:
        return ["whether it fits on GPUs of a certain kind: slime plan --kind KIND, with the same flags"]
    run = read_run(args, kind, asynchronous)
    phases = make_plan(run).phases if run is not None else ()
    lines = [f"  {phase.name:<15} {phase.total / GIB:.1f} GiB of {kind.memory / GIB:.1f}" for phase in phases]
    warnings = [f"  warning: {problem}" for problem in misfits(args, asynchronous, kind)]
    return [f"memory by phase on each GPU ({kind.name}; slime plan shows what it consists of)", *lines, *warnings]
