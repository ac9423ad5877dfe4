"""``slime plan`` and ``slime check-hooks``, for the time before a run. Both take the flags of
train.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cli.command import CommandError, finite, whole

from ..plan.setups import KINDS
from . import Subparsers, print_report

if TYPE_CHECKING:
    from slime.config.args import Args

_ROWS = 200
"""So many rows of the data give the mean length of a prompt."""


def add_plan(commands: Subparsers) -> None:
    """Add the subparser of ``slime plan``. Its further words are flags of train.py."""
    parser = commands.add_parser(
        "plan",
        help="say without a GPU whether a run fits, how long its steps take and which layout is "
        "best",
        usage="slime plan [--kind KIND] [--gpus N] [--async] [options] <flags of train.py>",
        description="Needs config.json of the model and no weights. Exit code 1 if the run does not fit.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--kind", choices=list(KINDS), default="h200", help="kind of the GPUs (default: h200)"
    )
    parser.add_argument(
        "--gpus",
        type=whole(1, 100_000),
        help="number of GPUs to find layouts for (default: those of the flags)",
    )
    parser.add_argument(
        "--async", dest="asynchronous", action="store_true", help="plan the run of train_async.py"
    )
    parser.add_argument(
        "--mean-prompt",
        type=finite(0, 1e8, above=True),
        help="mean tokens of a prompt (default: that of the first rows of --prompt-data if they "
        "are on this machine with the tokenizer, otherwise 256)",
    )
    responses = parser.add_mutually_exclusive_group()
    responses.add_argument(
        "--mean-response",
        type=finite(0, 1e8, above=True),
        help="mean tokens of a response (default: the largest length)",
    )
    responses.add_argument(
        "--median-response",
        type=finite(0, 1e8, above=True),
        help="median tokens of a response, instead of the mean",
    )
    responses.add_argument(
        "--lengths-from", metavar="RUN", help="take the lengths of this finished run's samples"
    )
    parser.add_argument(
        "--sigma",
        type=finite(0, 5),
        default=0.0,
        help="spread of the logarithm of the lengths (default: 0)",
    )
    parser.add_argument(
        "--layouts", type=whole(0, 1000), default=5, help="layouts to show, 0 for none (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON instead")
    parser.set_defaults(run=plan, takes_flags=True)


def plan(options: argparse.Namespace) -> int:
    """Print the plan of the run whose flags are the further words of the command.

    Returns:
        1 if the run does not fit, otherwise 0.

    Raises:
        CommandError: The flags or options are wrong, config.json of the model is not on this
            machine, or the run to take lengths from has no samples.
    """
    from slime.backends.base import TrainNeeds

    from ..dry_run import mean_prompt_tokens
    from ..plan.layouts import best, ways
    from ..plan.page import as_json, page
    from ..plan.plan import make_plan
    from ..plan.read import ASSUMED_PROMPT, read_run

    args = _arguments(options)
    response_tokens, lengths = _lengths(options)
    # A plan needs neither data nor a tokenizer.
    prompt_tokens = (
        options.mean_prompt or mean_prompt_tokens(args, _ROWS, _tell_assumed) or ASSUMED_PROMPT
    )
    run = read_run(
        args,
        KINDS[options.kind],
        options.asynchronous,
        prompt_tokens,
        response_tokens,
        options.sigma,
        lengths,
    )
    if run is None:
        raise CommandError(
            f"config.json of --hf-checkpoint {args.hf_checkpoint} is not on this machine, or "
            "lacks the model's size: give a local folder with that file; weights are not needed"
        )
    # The passes that the trainer makes follow from the flags of the loss.
    passes = TrainNeeds.from_args(args).log_prob_passes(args.num_steps_per_rollout or 1)
    run = replace(run, work=replace(run.work, log_prob_passes=passes))
    made = make_plan(run)
    # Layouts and modes are compared only for runs with both sides.
    both = run.train is not None and run.engine is not None
    others = (
        best(run, options.gpus or made.gpus, options.layouts) if both and options.layouts else []
    )
    # Without a distribution of lengths there is no tail, which decides how far the modes differ.
    modes = ways(made, options.gpus or made.gpus) if others and (options.sigma or lengths) else []
    planned = made, others, modes, options.rest
    print_report(options.json, as_json(*planned), page(*planned))
    return int(not made.fits)


def _arguments(options: argparse.Namespace) -> Args:
    """Resolve the flags of the run as on a machine with its GPUs."""
    from slime.config.layout import ParallelLayout
    from slime.config.machine import Machine
    from slime.config.parser import ConfigError, read_command_line
    from slime.config.resolve import resolve_defaults
    from slime.config.rules import Run

    args, problems = read_command_line(options.rest, prog="slime plan")
    if args.hf_checkpoint is None:
        problems.insert(
            0, "--hf-checkpoint is needed: a local folder with the config.json of the model"
        )
    # The machine of the run, which this one need not be.
    machine = Machine(min(options.gpus or 8, 8), 16, False)
    problems += resolve_defaults(Run(args, options.asynchronous, machine))
    if not problems and not args.debug_rollout_only:
        problems += ParallelLayout.from_args(args).problems()
    if problems:
        raise CommandError(str(ConfigError(problems)))
    if "train_dtype" not in args.explicit:
        args = args.with_values(train_dtype="bfloat16", rollout_dtype="bfloat16")
    # this machine may lack triton, the one with the GPUs has it
    if "compile_layers" not in args.explicit:
        args = args.with_values(compile_layers=args.lora_base_quantization is None)
    return args


def _tell_assumed(why: str) -> None:
    from ..plan.read import ASSUMED_PROMPT

    print(
        f"slime plan: prompts of {ASSUMED_PROMPT:g} tokens are assumed (--mean-prompt): {why}",
        file=sys.stderr,
    )


def _lengths(options: argparse.Namespace) -> tuple[float | None, tuple[int, ...]]:
    """Return the mean tokens of a response, and the measured lengths."""
    from ..plan.seconds import measured_lengths

    if options.lengths_from is not None:
        if options.sigma:
            raise CommandError(
                "--sigma has no effect on the lengths of --lengths-from: give one of them"
            )
        try:
            return None, measured_lengths(Path(options.lengths_from).expanduser())
        except ValueError as error:
            raise CommandError(f"--lengths-from: {error}") from error
    if options.median_response is not None:
        return options.median_response * exp(options.sigma**2 / 2), ()
    return options.mean_response, ()


def add_check_hooks(commands: Subparsers) -> None:
    hooks = commands.add_parser(
        "check-hooks",
        help="test your functions with small real samples on the CPU; takes the flags of train.py",
        usage="slime check-hooks [--check-timeout SECONDS] [--check-tool-answer TEXT] <flags of "
        "train.py>",
        description="Calls each function that the flags name as a run would, and reports violations of "
        "its contract.",
        allow_abbrev=False,
    )
    hooks.add_argument(
        "--check-timeout",
        type=finite(0, above=True),
        default=60.0,
        help="deadline of each call in seconds (default: 60)",
    )
    hooks.add_argument(
        "--check-tool-answer",
        help="answer of the model after which a generate function must continue with a tool turn",
    )
    hooks.set_defaults(run=_check_hooks, takes_flags=True)


def _check_hooks(args: argparse.Namespace) -> int:
    from ..hooks import check_hooks
    from ..hooks.guard import HOOK_THREAD

    status = check_hooks(args.rest, print, args.check_timeout, args.check_tool_answer)
    if any(thread.name == HOOK_THREAD for thread in threading.enumerate()):
        # The function that did not return has been reported. Plain functions run in threads of
        # asyncio's pool, for which a normal exit would wait.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
