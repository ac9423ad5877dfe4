"""``slime check-hooks <flags of train.py>``: test the user's functions that the flags name before a
run.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from slime.cli.command import CommandError
from slime.config.args import FLAGS, Args
from slime.config.hooks import CALLS, HOOK_NAMES, HookError, load_function
from slime.config.parser import check_args
from slime.plugins.agents.config import (
    AGENT_GENERATE,
    ENVIRONMENT_GENERATE,
    ENVIRONMENT_SOURCE,
    MCP_GENERATE,
)

from .bench import Bench
from .guard import Complaint, check_call, complaint_of

LIMIT_SECONDS = 60.0
# by default it is the rollout function, which is tested already
_EXCLUDED = ("eval_function_path",)


def check_hooks(
    flags: Sequence[str],
    say: Callable[[str], None] = print,
    limit: float = LIMIT_SECONDS,
    tool_answer: str | None = None,
) -> int:
    """Test every hook that the flags of train.py name.

    Args:
        say: Called with each line of the report.
        limit: Deadline of each call in seconds.
        tool_answer: An answer of the model after which a generate function must continue with a
            tool turn.

    Returns:
        0 if all hooks satisfy their contract, otherwise 1.

    Raises:
        CommandError: There is nothing to check, or there is no tokenizer for the samples.
    """
    args, problems = check_args(flags)
    hooks = list(named_hooks(args))
    if not hooks:
        own_class = " (train.py checks the class of --advantage-estimator itself when it starts)"
        raise CommandError(
            f"there is nothing to check: these flags name no functions of your own{own_class}"
        )
    # Each hook in the order of a run, since later ones get the results of those before.
    failed = 0
    with Bench(args, limit, tool_answer) as bench:
        for option, name, path in hooks:
            failed += _report(bench, option, name, path, say)
    # What the start of a run would refuse besides.
    others = [
        line for line in problems if not any(line.startswith(option) for option, _, _ in hooks)
    ]
    if others:
        say("in addition, train.py would refuse these flags on this machine:")
        for line in others:
            say(f"      {line}")
    say(f"{len(hooks) - failed} of {len(hooks)} hooks satisfy their contract")
    return 1 if failed else 0


_OWN = (AGENT_GENERATE, ENVIRONMENT_GENERATE, ENVIRONMENT_SOURCE, MCP_GENERATE)


def named_hooks(args: Args) -> Iterator[tuple[str, str, str]]:
    """Yield (option, argument name, path) of the user's functions, in the order in which they are
    tested.
    """
    from slime.data.eval_config import resolve_eval_datasets

    from .probes import PROBES

    # A probe may need the results of those before it.
    first = [name for name in PROBES if name in FLAGS]
    others = [
        name
        for name, flag in FLAGS.items()
        if flag.kind in ("hook", "repeat") and name not in first
    ]
    for name in (*first, *others):
        flag = FLAGS[name]
        value = getattr(args, name)
        if value in _OWN or (name in _EXCLUDED and value == args.rollout_function_path):
            continue
        for path in (value or []) if flag.kind == "repeat" else [value]:
            # Those of slime's plug-ins, which other flags have set, are not the user's.
            if path and path != flag.default and not path.startswith("slime.plugins."):
                yield flag.option, name, path
    # Evaluation sets may have functions of their own.
    try:
        datasets = resolve_eval_datasets(args)
    except (ValueError, TypeError, FileNotFoundError):
        return  # check_args has reported it
    for config in datasets:
        for name in ("custom_generate_function_path", "custom_rm_path"):
            path = getattr(config, name)
            if path and path != getattr(args, name):
                yield f"data set {config.name}: {name}", name, path


def _report(bench: Bench, option: str, name: str, path: str, say: Callable[[str], None]) -> int:
    bench.notes.clear()
    try:
        text = _try(bench, option, name, path)
    except Complaint as complaint:
        say(f"FAIL  {option} {path}")
        say(f"      {complaint.text}")
        if complaint.place:
            say(f"      {complaint.place}")
        return 1
    say(f"ok    {option} {path}: {text}")
    for note in dict.fromkeys(bench.notes):
        say(f"note  {note}")
    return 0


def _try(bench: Bench, option: str, name: str, path: str) -> str:
    from .probes import PROBES

    fn = _load(name, path)
    probe = PROBES.get(name)
    if probe is None and name not in CALLS:
        return "it exists, but it is called only in a run"
    # The function of an evaluation set takes the place of that of the run while it is tried.
    of_the_run = getattr(bench.args, name)
    if option.startswith("data set"):
        bench.args = bench.args.with_values(**{name: path})
    try:
        if name in CALLS:
            check_call(name, fn)
        return (
            "its signature fits, but it is called only in training"
            if probe is None
            else probe(bench, fn)
        )
    except (Complaint, CommandError):
        raise
    except Exception as error:  # raised by the run's own code for the result of the hook
        raise complaint_of(error, fn) from error
    finally:
        bench.args = bench.args.with_values(**{name: of_the_run})


def _load(name: str, path: str) -> Any:
    try:
        return load_function(path, HOOK_NAMES.get(name))
    except HookError as error:
        raise Complaint(str(error)) from error
    except BaseException as error:  # the user's module can raise anything
        # The line of the user's file, which for a syntax error no frame has.
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.filename}:{last.lineno}"
        if isinstance(error, SyntaxError):
            place = f"{error.filename}:{error.lineno}"
        raise Complaint(f"importing it raised {type(error).__name__}: {error}", place) from error
