"""The runs that the page shows, and what is kept in memory of each."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime.cli.command import CommandError
from slime.observability import run_dir
from slime.observability.run_dir import RunDir
from slime.observability.run_state import RunState

from ..doctor.facts import processes_of
from ..summary import no_run, read_state, runs_in
from .follow import EngineLoads, Ledger, Series
from .index import SampleIndex
from .tokens import TokenDumps

logger = logging.getLogger(__name__)


class NoRuns(CommandError):
    """No folder of a run was found. The message says where it was looked for."""


class Run:
    """One run. The methods of its parts are thread-safe.

    Args:
        key: Its name in addresses of the page.
        cache: Folder of the indexes; None keeps them in memory.
    """

    def __init__(self, key: str, folder: Path, cache: Path | None) -> None:
        self.key = key
        self.folder = folder
        self.files = RunDir(folder)
        self.series = Series(self.files.metrics)
        self.ledger = Ledger(self.files.ledger)
        self.loads = EngineLoads(self.files.engines)
        self._configured = _modified(self.files.config)
        self.settings = read_settings(self.files.config)
        self.index = SampleIndex(folder, cache, self.settings)
        self.tokens = TokenDumps(folder, self.settings)

    def refresh(self) -> None:
        """Read what the run has appended to its metrics, its ledger and the load of its engines;
        and its settings, if a resume or a new run of this name has replaced them."""
        # A resume replaces the settings.
        if (configured := _modified(self.files.config)) != self._configured:
            self._configured = configured
            self.settings = read_settings(self.files.config)
            self.index.settings = self.settings
            self.tokens = TokenDumps(self.folder, self.settings)
        self.series.refresh()
        self.loads.refresh()
        self.ledger.refresh()

    def state(self) -> tuple[RunState | None, str]:
        """Return what the driver wrote last, and its status in one word: that of the state, or

        ``dead`` (the driver ended without saying so), ``remote`` (it runs on another machine, and
        is not seen from here), or ``unknown`` (a run of an older release, without ``state.json``).
        """
        state = read_state(self.folder)
        if state is None:
            return None, "unknown"
        if state.status not in ("running", "restarting"):
            return state, state.status
        # The driver may have been killed, so that its last word is no longer true.
        processes = processes_of(state)
        if processes is None:
            return state, "remote"
        return state, state.status if processes else "dead"


class Runs:
    """All runs under some folders. New ones are found while the page is open.

    Args:
        places: Folders of runs, or folders that have such folders in them.
        cache: Folder of the indexes; None keeps them in memory.

    Raises:
        NoRuns: There is no run yet.
    """

    def __init__(self, places: Sequence[Path], cache: Path | None) -> None:
        self.places = [place.expanduser() for place in places]
        self.cache = cache
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._folders: dict[Path, str] = {}
        self.find()
        if not self._runs:
            raise NoRuns(f"there is no folder of a run: {'; '.join(map(no_run, self.places))}")

    def find(self) -> None:
        """Add the runs that began since the last call."""
        with self._lock:
            for place in self.places:
                for folder in runs_in(place):
                    if folder not in self._folders:
                        key = self._new_key(folder.name)
                        self._folders[folder] = key
                        self._runs[key] = Run(key, folder, self.cache)

    def _new_key(self, name: str) -> str:
        plain = re.sub(r"[^\w.-]", "_", name) or "run"
        # Runs in different folders may have the same name.
        keys = (plain, *(f"{plain}~{number}" for number in range(2, 10_000)))
        return next(key for key in keys if key not in self._runs)

    def all(self) -> list[Run]:
        """Return the runs, those with the newest metrics first; also before these have been
        read.
        """
        return sorted(self._runs.values(), key=lambda run: -_modified(run.files.metrics))

    def get(self, key: str) -> Run | None:
        return self._runs.get(key)

    def refresh(self, most_files: int | None = None) -> int:
        """Read what is new of all runs, and return how many files of samples remain to be read."""
        left = 0
        for run in list(self._runs.values()):
            try:
                run.refresh()
                left += run.index.refresh(most_files)
            except Exception:  # one unreadable run must not keep the page from following the others
                logger.exception(f"{run.folder} could not be read")
        return left

    def prepare(self) -> None:
        """Load what reads dumps, if a run has any: importing torch takes seconds, which the first
        reader of a sample should not wait for."""
        if "torch" not in sys.modules and any(
            run.tokens.recorded(run.series.last_step) for run in self.all()
        ):
            import torch  # noqa: F401

    def close(self) -> None:
        for run in self._runs.values():
            run.index.close()


class Refresher(threading.Thread):
    """Builds the indexes in the background, and follows the runs while the page is open."""

    def __init__(self, runs: Runs, seconds: float = 1.0) -> None:
        super().__init__(name="slime-ui-refresh", daemon=True)
        self._runs = runs
        self._seconds = seconds
        self._stop_event = threading.Event()

    def run(self) -> None:
        looked = time.monotonic()
        while not self._stop_event.is_set():
            # The thread must live as long as the page, whatever it reads.
            left = 0
            try:
                left = self._runs.refresh(most_files=20)
                if time.monotonic() - looked > 5:
                    self._runs.find()
                    looked = time.monotonic()
                if not left:
                    self._runs.prepare()
            except Exception:
                logger.exception("the runs could not be read; trying again")
            if not left:
                self._stop_event.wait(self._seconds)

    def stop(self) -> None:
        self._stop_event.set()
        self.join(timeout=30)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def read_settings(path: Path) -> Mapping[str, object]:
    """Return the flags of a run; empty if they cannot be read."""
    try:
        return run_dir.read_settings(path)
    except run_dir.UnreadableRun:
        return {}
