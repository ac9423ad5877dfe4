"""The table of a planned weight sync: it follows the plan of the code, and the page has what the
script prints.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]


def table(**changes: Any) -> list[str]:
    spec = importlib.util.spec_from_file_location(
        "benchmark_sync_plan", CHECKOUT / "benchmarks" / "sync_plan.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    given = {
        "parameters": 671e9,
        "engines": "8,32,128",
        "engine_gpus": 16,
        "ranks": 512,
        "nics": 1,
        "nic_gbit": 400.0,
    }
    lines: list[str] = module.table(argparse.Namespace(**{**given, **changes}))
    return lines


def test_the_page_has_the_scripts_table() -> None:
    page = (CHECKOUT / "benchmarks" / "history.md").read_text(encoding="utf-8")
    assert "\n".join(table()) in page, "print it with benchmarks/sync_plan.py"


def test_senders_are_those_of_a_run() -> None:
    senders = [int(line.split("|")[2]) for line in table()[2:]]
    assert senders == [1, 2, 8]  # one for every 16 engines
    assert int(table(engines="128", ranks=4)[2].split("|")[2]) == 4, "a rank sends once"


def test_several_cards_share_the_bytes_until_the_sync_itself_is_slower() -> None:
    seconds = [float(table(engines="32", nics=nics)[2].split("|")[8]) for nics in (1, 2, 8)]
    assert seconds[0] > seconds[1] == seconds[2]
