"""Why trainer and engine disagree about a recorded step (``slime gap``)."""

from __future__ import annotations

import argparse

from slime.registry import register


def parts() -> None:
    """Register the command."""
    register("command", "gap", add_gap)


def add_gap(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from slime.plugins.tools.commands.replay import add_of_step

    add_of_step(
        commands,
        "gap",
        _gap,
        "why engine and trainer gave the samples of a training step different log-probs",
        "Names the causes, the flag for each, and the tokens with the largest difference.",
    )


def _gap(options: argparse.Namespace) -> int:
    from transformers.utils import logging as transformers_logging

    from slime.plugins.tools.commands.replay import print_result, reading, tell_code, texts
    from slime.plugins.tools.replay import read_run

    from .run import find_gap, page

    transformers_logging.disable_progress_bar()
    with reading():
        run = read_run(
            options.run_dir.resolve(),
            options.step,
            options.rest,
            tell_code if options.run_its_code else None,
        )
        result = find_gap(run, options.step)
    shown = page(result, texts(run, [one.token for one in result.tokens]))
    print_result(result, options.json, shown, first=result.explained.first)
    return 0
