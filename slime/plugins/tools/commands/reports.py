"""What the folder of a run says about it: ``slime doctor``, ``slime summary``, ``slime ledger``,
``slime ui``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cli.command import CommandError, whole, writing
from slime.observability.files import shown

from . import Subparsers, print_report

if TYPE_CHECKING:
    from rich.table import Table

    from ..summary import Report
    from ..ui.runs import Runs

_MOST_ROWS = 20


def add_doctor(commands: Subparsers) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="say why a run hung, died, slowed down or stopped learning; exit code 1 if something "
        "is wrong",
        description="Reads the folder that a run leaves, also while it goes on or after it was killed.",
    )
    doctor.add_argument(
        "run_dir",
        type=Path,
        nargs="?",
        default=Path("outputs/latest"),
        help="folder of a run (default: outputs/latest)",
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON instead")
    doctor.set_defaults(run=diagnosis)


def diagnosis(args: argparse.Namespace) -> int:
    """Print the diagnosis of a run.

    Returns:
        1 if something is wrong, otherwise 0; hints do not count.

    Raises:
        CommandError: The folder is not that of a run.
    """
    from ..doctor import diagnose, page
    from ..doctor.evidence import stacks
    from ..doctor.facts import read_facts

    facts = read_facts(args.run_dir.resolve(), stacks)
    findings = diagnose(facts)
    print_report(args.json, [*map(asdict, findings)], page(facts, findings))
    return int(any(not finding.hint for finding in findings))


def add_summary(commands: Subparsers) -> None:
    parser = commands.add_parser("summary", help="print the final table of a run again")
    parser.add_argument("run_dir", type=Path, help="folder of a run, e.g. outputs/latest")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead")
    parser.set_defaults(run=summary)


def summary(args: argparse.Namespace) -> None:
    """Print the table of a run, or the figures as JSON.

    Raises:
        CommandError: The folder is not the folder of a run.
    """
    from rich.console import Console

    from slime.observability.metrics import MetricsError
    from slime.observability.run_dir import RunDir

    from ..summary.figures import print_summary, summarize

    run_dir = RunDir(args.run_dir.resolve())
    try:
        figures = summarize(run_dir)
    except MetricsError as error:
        raise CommandError(str(error)) from error
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        print_summary(run_dir, figures, Console(highlight=False, markup=False))


def add_ledger(commands: Subparsers) -> None:
    parser = commands.add_parser(
        "ledger",
        help="show the outcome of each prompt group of a run; exit code 1 if the ledger is "
        "inconsistent or unchecked",
    )
    parser.add_argument("run_dir", type=Path, help="folder of a run, e.g. outputs/latest")
    parser.add_argument("--json", action="store_true", help="print it as JSON instead")
    parser.set_defaults(run=ledger)


def ledger(args: argparse.Namespace) -> int:
    """Print the ledger of a run (a folder or a ledger file) as of its last checkpoint.

    Returns:
        0 if the ledger is consistent, otherwise 1; also 1 if it could not be checked.

    Raises:
        CommandError: There is no ledger, or it cannot be read.
    """
    from rich.console import Console

    from slime.observability.files import regular
    from slime.observability.run_dir import RunDir

    from ..summary import UNCHECKED, read_ledger

    path = args.run_dir
    file = RunDir(path.resolve()).ledger if path.is_dir() else path
    try:
        report = read_ledger(regular(file) if path.is_dir() else file)
    except FileNotFoundError as error:
        raise CommandError(
            f"{file} does not exist: pass the folder of a run, e.g. outputs/latest"
        ) from error
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror or error}") from error
    if args.json:
        print(
            json.dumps({"closes": report.closes, "asked": report.asked, **vars(report)}, indent=2)
        )
        return int(not report.closes)
    console = Console(highlight=False, markup=False)
    for table in _tables(report):
        console.print(table)
    for undone in report.rolled_back:
        console.print(
            shown(
                f"attempt {undone['attempt']} continued after step {undone['after']}: "
                f"{undone['rows']} groups that later steps had closed were rolled back "
                f"({_intervals(undone['groups'])})"
            )
        )
    if report.beyond:
        console.print(
            f"{report.beyond} groups were closed after the last checkpoint: a resume generates "
            "them again"
        )
    for problem in report.problems:
        if problem == UNCHECKED:
            console.print(
                f"not checked: {problem}, so there are no sums to compare the groups with"
            )
        else:
            console.print(f"inconsistent: {shown(problem)}", style="red")
    if report.closes and report.cut:
        console.print(
            f"consistent: {report.asked} groups were requested, and each is in exactly one place"
        )
    return int(not report.closes)


def _tables(report: Report) -> Iterator[Table]:
    cut = report.cut
    counts: list[tuple[object, object]] = [*report.counts.items()]
    if cut:
        counts += [("ahead of training", len(cut["ahead"])), ("open", len(cut["open"]))]
    yield _table(
        f"groups as of step {shown(cut['cut'])}" if cut else "groups before the first checkpoint",
        ("state", "groups"),
        counts,
    )
    yield _table(
        "trained groups by the weight versions of their tokens",
        ("versions", "groups"),
        [(names or "-", count) for names, count in list(report.versions.items())[-_MOST_ROWS:]],
    )
    if cut and cut["open"]:
        rows = cut["open"][:_MOST_ROWS]
        yield _table(
            f"open groups ({len(rows)} of {len(cut['open'])})",
            ("group", "state", "asked in", "versions", "tokens", "returns"),
            [
                (row["group"], row["state"], row["asked"], " ".join(row["versions"]) or "-", row.get("tokens", 0),
                 row.get("returns", 0))
                for row in rows
            ],
        )  # fmt: skip


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    from rich.table import Table

    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="right" if name == "groups" else "left")
    for row in rows:
        table.add_row(*map(shown, row))
    return table


def _intervals(intervals: list[list[int]]) -> str:
    return (
        ", ".join(
            str(first) if end == first + 1 else f"{first}-{end - 1}" for first, end in intervals
        )
        or "none"
    )


def add_ui(commands: Subparsers) -> None:
    page = commands.add_parser(
        "ui",
        help="open a local page with curves, steps, samples and tokens of runs, also while they "
        "go on",
        description="Reads the folders that runs leave. The page needs no network: every file of it is "
        "in the package.",
    )
    page.add_argument(
        "runs",
        type=Path,
        nargs="*",
        default=[Path("outputs")],
        metavar="RUN",
        help="folder of a run, or a folder that has such folders in it (default: outputs)",
    )
    page.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; on any but a loopback address, the page needs the token in "
        "the printed address (default: 127.0.0.1)",
    )
    page.add_argument(
        "--port",
        type=whole(0, 65535),
        help="port to listen on (default: 8321, or a free one if it is taken)",
    )
    page.add_argument(
        "--token",
        action="store_true",
        help="ask for the token on a loopback address too, which other users can reach",
    )
    page.add_argument(
        "--export", type=Path, metavar="FILE", help="write the page as one HTML file instead"
    )
    page.add_argument(
        "--export-steps",
        type=whole(1),
        default=12,
        help="steps of each run in this file (default: 12)",
    )
    page.add_argument(
        "--export-samples",
        type=whole(0),
        default=32,
        help="samples of each of these steps (default: 32)",
    )
    page.set_defaults(run=ui)


def ui(args: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C, or write it into one file.

    Raises:
        CommandError: There is no run, the address cannot be used, or the file cannot be written.
    """
    from slime.config.machine import cache_folder

    from ..ui.runs import Runs

    runs = Runs(args.runs, cache_folder("ui"))
    try:
        if args.export is not None:
            _write(runs, args.export, args.export_steps, args.export_samples)
        else:
            _serve(runs, args.host, args.port, args.token)
    finally:
        runs.close()


def _write(runs: Runs, path: Path, steps: int, samples: int) -> None:
    from slime.observability.files import replacing

    from ..ui import Limits, export

    html = export(runs, Limits(steps, samples))
    with writing(path), replacing(path) as temporary:
        temporary.write_text(html, encoding="utf-8")
    print(path)


def _serve(runs: Runs, host: str, port: int | None, token: bool) -> None:
    from ..ui.runs import Refresher
    from ..ui.server import Door, PortTaken, bind, serve

    try:
        listener = bind(host, port)
    except PortTaken as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(
            f"--host {host}: {error.strerror or error}; it takes an address of this machine, or "
            "0.0.0.0 for all of them"
        ) from error
    door = Door.at(host, listener.getsockname()[1], token)
    # The runs are followed by a thread, and requests see what it has read.
    refresher = Refresher(runs)
    refresher.start()

    async def until_stopped() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError):
                loop.add_signal_handler(number, stop.set)
        print(f"slime ui: {door.address}\nCtrl-C ends it.", flush=True)
        await serve(runs, door, listener, stop)

    try:
        asyncio.run(until_stopped())
    finally:
        refresher.stop()
