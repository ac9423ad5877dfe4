"""A subcommand of ``slime``."""

from __future__ import annotations

import argparse


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    haiku = commands.add_parser("haiku", help="print a poem")
    haiku.add_argument("--about", default="slime")
    haiku.set_defaults(run=lambda options: print(f"an old silent {options.about}"))
