"""Everything that can be known to be wrong before a process starts, reported together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.config.args import Args


def parse_and_check(argv: Sequence[str] | None = None, asynchronous: bool = False) -> Args:
    """Flags, files, rows and labels; prints all problems and exits with 2 if there are any."""
    from slime.config.parser import parse_args

    words = list(argv) if argv is not None else None
    checks = (_check_data, _check_snapshots, _check_server_options)
    return parse_args(words, asynchronous=asynchronous, extra_checks=checks)


def _check_data(args: Args) -> list[str]:
    from slime.data.validate import check_data

    return check_data(args)


def _check_snapshots(args: Args) -> list[str]:
    """``--load`` and ``--save`` name no checkpoints of another program."""
    from slime.checkpoint.snapshot import SnapshotError, latest, refuse_foreign

    problems = []
    try:
        if args.save:
            refuse_foreign(Path(args.save).expanduser())
    except SnapshotError as error:
        problems.append(str(error))
    try:
        if args.load:
            latest(Path(args.load).expanduser(), args.ckpt_step, digests=False)
    except SnapshotError as error:
        problems.append(str(error))
    return problems


def _check_server_options(args: Args) -> list[str]:
    """Ask the installed SGLang and router; what is wrong with the plan itself is told by the configuration."""
    from slime.config.server_groups import ServerGroupError
    from slime.engines.plan import plan_engines
    from slime.engines.sglang.check import check_launch

    if args.debug_train_only:
        return []
    try:
        specs = plan_engines(args)
    except (ServerGroupError, OSError):
        return []
    return check_launch(args, specs)
