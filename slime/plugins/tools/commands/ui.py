"""``slime ui [RUN...]``: a local page that shows runs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cli.errors import CommandError, writing

if TYPE_CHECKING:
    from slime.plugins.tools.ui.runs import Runs


def ui(
    places: Sequence[Path],
    host: str,
    port: int | None,
    token: bool = False,
    export: Path | None = None,
    steps: int = 12,
    samples: int = 32,
) -> int:
    """Serve the page until Ctrl-C, or write it into one file.

    Args:
        places: Folders of runs, or folders of such folders.
        token: Whether the page needs a token on a loopback address too.
        export: The file to write instead.
        steps, samples: Of each run and of each of these steps, how many the file holds.

    Raises:
        CommandError: There is no run, the address cannot be used, or the file cannot be written.
    """
    from slime.config.machine import cache_folder
    from slime.plugins.tools.ui.runs import NoRuns, Runs

    try:
        runs = Runs(places, cache_folder("ui"))
    except NoRuns as error:
        raise CommandError(str(error)) from error
    try:
        if export is not None:
            _write(runs, export, steps, samples)
        else:
            _serve(runs, host, port, token)
    finally:
        runs.close()
    return 0


def _write(runs: Runs, path: Path, steps: int, samples: int) -> None:
    from slime.observability.best_effort import replacing
    from slime.plugins.tools.ui.export import Limits, export

    html = export(runs, Limits(steps, samples))
    with writing(path), replacing(path) as temporary:
        temporary.write_text(html, encoding="utf-8")
    print(path)


def _serve(runs: Runs, host: str, port: int | None, token: bool) -> None:
    from dataclasses import replace

    from slime.plugins.tools.ui.runs import Refresher
    from slime.plugins.tools.ui.server import Door, PortTaken, bind, serve

    try:
        listener = bind(host, port)
    except PortTaken as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(
            f"--host {host}: {error.strerror or error}; it takes an address of this machine, or 0.0.0.0 for all of them"
        ) from error
    door = replace(Door.at(host, 0, token), port=listener.getsockname()[1])
    refresher = Refresher(runs)
    refresher.start()

    async def until_stopped() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError):
                loop.add_signal_handler(number, stop.set)
        print(f"slime ui: {door.address}\nCtrl-C ends it.", flush=True)
        await serve(runs, door, listener, stop)

    try:
        asyncio.run(until_stopped())
    finally:
        refresher.stop()
