"""The command ``slime gap``."""

from __future__ import annotations

import argparse

from slime.plugins.tools.commands import Subparsers
from slime.plugins.tools.commands.replay import (
    add_of_step,
    print_result,
    reading,
    tell_code,
    texts,
)


def add_gap(commands: Subparsers) -> None:
    add_of_step(
        commands,
        "gap",
        _gap,
        "why engine and trainer gave the samples of a training step different log-probs",
        "Names the causes, the flag for each, and the tokens with the largest difference.",
    )


def _gap(options: argparse.Namespace) -> int:
    from transformers.utils import logging as transformers_logging

    from slime.plugins.gap.run import find_gap, page
    from slime.plugins.tools.replay.recorded import read_run

    transformers_logging.disable_progress_bar()
    with reading():
        tell = tell_code if options.run_its_code else None
        run = read_run(options.run_dir.resolve(), options.step, options.rest, tell)
        result = find_gap(run, options.step)
    named = texts(run, [one.token for one in result.tokens])
    print_result(result, options.json, page(result, named), first=result.explained.first)
    return 0
