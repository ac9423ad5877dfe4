"""``slime check-hooks <flags of train.py>``: test the user's functions that the flags name before a run."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from slime.cli.errors import CommandError
from slime.config.agent import AGENT_GENERATE, ENVIRONMENT_GENERATE, ENVIRONMENT_SOURCE, MCP_GENERATE
from slime.config.args import FLAGS, Args
from slime.config.hooks import CALLS, HOOK_NAMES, HookError, load_function
from slime.config.parser import check_args
from slime.plugins.tools.hooks.bench import Bench
from slime.plugins.tools.hooks.guard import Complaint, check_call, complaint_of

LIMIT_SECONDS = 60.0
_EXCLUDED = ("eval_function_path",)  # by default it is the rollout function, which is tested already


def check_hooks(argv: Sequence[str], say: Callable[[str], None] = print) -> int:
    """Test every hook that the command line names.

    Args:
        argv: The flags of train.py, and two more: ``--check-timeout SECONDS`` is the deadline of each call (default
            60); ``--check-tool-answer TEXT`` is an answer of the model after which a generate function must continue
            with a tool turn.
        say: Called with each line of the report.

    Returns:
        0 if all hooks satisfy their contract, otherwise 1.

    Raises:
        CommandError: There is nothing to check, or there is no tokenizer for the samples.
    """
    words, seconds = _own_flag(list(argv), "--check-timeout")
    words, answer = _own_flag(words, "--check-tool-answer")
    try:
        limit = LIMIT_SECONDS if seconds is None else float(seconds)
    except ValueError:
        limit = 0.0
    if not 0.0 < limit < math.inf:
        raise CommandError("--check-timeout needs a number of seconds")
    args, problems = check_args(words)
    hooks = list(named_hooks(args))
    if not hooks:
        own_class = " (train.py checks the class of --advantage-estimator itself when it starts)"
        raise CommandError(f"there is nothing to check: these flags name no functions of your own{own_class}")
    failed = 0
    with Bench(args, limit, answer) as bench:
        for option, name, path in hooks:
            failed += _report(bench, option, name, path, say)
    others = [line for line in problems if not any(line.startswith(option) for option, _, _ in hooks)]
    if others:
        say("in addition, train.py would refuse these flags on this machine:")
        for line in others:
            say(f"      {line}")
    fine = len(hooks) - failed
    say(f"{fine} of {len(hooks)} hooks satisfy their contract")
    return 1 if failed else 0


_OWN = (AGENT_GENERATE, ENVIRONMENT_GENERATE, ENVIRONMENT_SOURCE, MCP_GENERATE)


def named_hooks(args: Args) -> Iterator[tuple[str, str, str]]:
    """Yield (option, argument name, path) of the user's functions, in the order in which they are tested."""
    from slime.plugins.tools.hooks.probes import PROBES

    order = {name: i for i, name in enumerate(PROBES)}
    for name in sorted((name for name, flag in FLAGS.items() if flag.kind in ("hook", "repeat")), key=lambda n: order.get(n, 99)):  # fmt: skip  # noqa: E501
        value, flag = getattr(args, name), FLAGS[name]
        paths = list(value or []) if flag.kind == "repeat" else [value]
        same = (name in _EXCLUDED and value == args.rollout_function_path) or value in _OWN
        for path in paths:
            if path and path != flag.default and not same:
                yield flag.option, name, path
    yield from _of_evaluation(args)


def _of_evaluation(args: Args) -> Iterator[tuple[str, str, str]]:
    from slime.data.eval_config import resolve_eval_datasets

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
    from slime.plugins.tools.hooks import probes as hook_probes
    from slime.plugins.tools.hooks import probes_train as hook_probes_train

    fn = _load(name, path)
    probe = hook_probes.PROBES.get(name) or hook_probes_train.PROBES.get(name)
    if probe is None and name not in CALLS:
        return "it exists, but it is called only in a run"
    of_the_run = getattr(bench.args, name)
    if option.startswith("data set"):
        bench.args = bench.args.with_values(**{name: path})
    try:
        if name in CALLS:
            check_call(name, fn)
        return "its signature fits, but it is called only in training" if probe is None else probe(bench, fn)
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
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.filename}:{last.lineno}"
        if isinstance(error, SyntaxError):
            place = f"{error.filename}:{error.lineno}"
        raise Complaint(f"importing it raised {type(error).__name__}: {error}", place) from error


def _own_flag(argv: list[str], option: str) -> tuple[list[str], str | None]:
    """Remove a flag of this command from the words; return the other words and the flag's value."""
    argv = [part for word in argv for part in (word.split("=", 1) if word.startswith(f"{option}=") else [word])]
    if option not in argv:
        return argv, None
    at = argv.index(option)
    if at + 1 == len(argv):
        raise CommandError(f"{option} needs a {'number of seconds' if option == '--check-timeout' else 'text'}")
    return argv[:at] + argv[at + 2 :], argv[at + 1]
