"""``slime check-algo``: an estimator beside the exact gradient of the expected reward."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from slime.cli.errors import CommandError, writing
from slime.observability.regular import shown
from slime.plugins.tools.commands import Subparsers


def add_check_algo(commands: Subparsers) -> None:
    check = commands.add_parser(
        "check-algo",
        help="compare an estimator with the exact policy gradient of a tiny world; exit code 1 if "
        "a check fails that its design does not say",
        usage="slime check-algo NAME|FILE.py:CLASS [options] [flags of train.py]",
        description="Bias, variance, and whether the gradient depends on what must not matter: "
        "micro-batches, ranks, order, masked tokens, other groups. Flags of train.py, such as "
        "--calculate-per-token-loss or --use-tis, are part of what is checked.",
        allow_abbrev=False,
    )
    check.add_argument("algorithm", help="a name of --advantage-estimator, or FILE.py:CLASS")
    check.add_argument("--picture", type=Path, metavar="FILE", help="draw bias and variance (PNG)")
    check.add_argument("--json", action="store_true", help="print the result as JSON instead")
    check.set_defaults(run=_check, takes_flags=True)


def _check(options: argparse.Namespace) -> int:
    from slime.plugins.tools.check_algo.lab import CheckAlgoError, make_args
    from slime.plugins.tools.check_algo.report import as_dict, check_algorithm, draw, page

    try:
        report = check_algorithm(make_args(options.algorithm, options.rest))
    except CheckAlgoError as error:
        raise CommandError(str(error)) from error
    lines = [json.dumps(as_dict(report), indent=2)] if options.json else map(shown, page(report))
    print(*lines, sep="\n")
    if options.picture is not None and report.rows:
        try:
            with writing(f"--picture {options.picture}"):
                draw({report.name: report.rows}, options.picture)
        except ModuleNotFoundError as error:
            raise CommandError(
                f"--picture needs {error.name}: pip install 'slime-rl[plots]'"
            ) from error
    return int(bool(report.failing))
