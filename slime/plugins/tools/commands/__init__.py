"""The subcommands, each with the function that adds its parser. Heavy packages are imported when a
command runs.
"""

from __future__ import annotations

import argparse
from typing import TypeAlias

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""To what a command adds its parser."""
