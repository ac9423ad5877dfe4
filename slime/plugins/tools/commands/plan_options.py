"""The options of ``slime plan``."""

from __future__ import annotations

import argparse

from slime.cli.ranges import finite, whole


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subparser of ``slime plan``. Its further words are flags of train.py."""
    plan = commands.add_parser(
        "plan",
        help="say without a GPU whether a run fits, how long its steps take and which layout is best",
        usage="slime plan [--kind KIND] [--gpus N] [--async] [options] <flags of train.py>",
        description="Needs config.json of the model and no weights. Exit code 1 if the run does not fit.",
        allow_abbrev=False,
    )
    kinds = ["h200", "h100", "h20", "a100", "a100-40gb", "b200", "l40s"]
    plan.add_argument("--kind", choices=kinds, default="h200", help="kind of the GPUs (default: h200)")
    plan.add_argument(
        "--gpus", type=whole(1, 100_000), help="number of GPUs to find layouts for (default: those of the flags)"
    )
    plan.add_argument("--async", dest="asynchronous", action="store_true", help="plan the run of train_async.py")
    plan.add_argument(
        "--mean-prompt",
        type=finite(0, 1e8, above=True),
        help="mean tokens of a prompt (default: that of the first rows of --prompt-data if they are on this machine "
        "with the tokenizer, otherwise 256)",
    )
    responses = plan.add_mutually_exclusive_group()
    responses.add_argument(
        "--mean-response",
        type=finite(0, 1e8, above=True),
        help="mean tokens of a response (default: the largest length)",
    )
    responses.add_argument(
        "--median-response", type=finite(0, 1e8, above=True), help="median tokens of a response, instead of the mean"
    )
    responses.add_argument("--lengths-from", metavar="RUN", help="take the lengths of this finished run's samples")
    plan.add_argument(
        "--sigma", type=finite(0, 5), default=0.0, help="spread of the logarithm of the lengths (default: 0)"
    )
    plan.add_argument("--layouts", type=whole(0, 1000), default=5, help="layouts to show, 0 for none (default: 5)")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON instead")
    plan.set_defaults(run=_plan, takes_flags=True)


def _plan(args: argparse.Namespace) -> int:
    from slime.plugins.tools.commands.plan import PlanOptions, plan

    options = PlanOptions(
        args.kind,
        args.gpus,
        args.asynchronous,
        args.mean_prompt,
        args.mean_response,
        args.median_response,
        args.sigma,
        args.lengths_from,
        args.layouts,
        args.json,
    )
    return plan(args.rest, options)
