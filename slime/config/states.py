"""Whether what was asked for exists: works, accepted with a notice, or refused with the reason."""

from __future__ import annotations

from collections.abc import Hashable

from slime.config.args import FLAGS, Args
from slime.config.flag import Flag, Status


def state_of(flag: Flag, value: object) -> tuple[Status, str]:
    """State of one flag at one value; the default of a flag always works."""
    if value == flag.default or value is None:
        return "works", ""
    if isinstance(value, Hashable) and value in flag.limits:
        return flag.limits[value]
    return flag.status, flag.reason


def check_states(args: Args) -> tuple[list[str], list[str]]:
    """``(problems, notices)`` for the flags that the user set."""
    problems, notices = [], []
    for name, flag in FLAGS.items():
        if name not in args.explicit:
            continue
        value = getattr(args, name)
        status, reason = state_of(flag, value)
        typed = flag.option if flag.is_bool or flag.takes_list else f"{flag.option} {value}"
        if status == "notice":
            notices.append(f"{typed}: no effect: {reason}")
        elif status == "refused":
            problems.append(f"{typed} is not supported: {reason}")
    return problems, notices
