"""``python tools/mutate.py``: how many planted mistakes the nearest tests find.

Each mistake of tools/mutants.txt, such as a wrong sign or a dropped factor, is made in a copy of
the checkout, where the tests nearest to its file run until one fails. A mutant is *killed* if a
test fails with it and passes without it, *survived* if none fails, *stale* if its text is not once
in its file, and *broken* if its tests fail, or find nothing, even without it. The exit status is 1
unless 95 % of all are killed. A result is kept until the mutant, its file or its tests change, so a
repeated call goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
VERDICTS = ("killed", "survived", "stale", "broken", "not run")
MARKS = "not slow and not real and not sglang and not vllm and not megatron and not long"
PYTEST = ("-x", "-q", "-m", MARKS, "--timeout=180", "--hypothesis-seed=0", "-p", "no:cacheprovider")
# What tests import, but nothing of slime: imported once for all mutants, because together they take
# ten seconds.
PACKAGES = (
    "aiohttp",
    "hypothesis",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "transformers.generation",
)

_tree = Path()  # of this process: its copy of the checkout
_seconds = itertools.count(1)
# tests that have failed with a mutant, and whether they pass without one
_sound: dict[str, bool] = {}
_stop = multiprocessing.get_context("fork").Event()  # judge no further mutant


class Mutant(NamedTuple):
    """A mistake: in ``file``, the text ``old``, which is there once, becomes ``new``."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def is_stale(self) -> bool:
        return (
            not (ROOT / self.file).is_file() or (ROOT / self.file).read_text().count(self.old) != 1
        )

    def digest(self) -> str:
        """Return what changes with the mutant, with its file and with its tests."""
        digest = hashlib.sha256(repr(self).encode())
        for path in map(ROOT.joinpath, (self.file, *self.tests)):
            for found in [path] if path.is_file() else sorted(path.rglob("*.py")):
                digest.update(found.read_bytes())
        return digest.hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.file}: {self.old} ==> {self.new}"


def read_table() -> list[Mutant]:
    """Read the table: a line with a file and perhaps its tests, followed by indented lines ``old
    ==> new``.
    """
    mutants: list[Mutant] = []
    file, tests = "", tuple[str, ...]()
    for line in (ROOT / "tools" / "mutants.txt").read_text().splitlines():
        if line.startswith(" "):
            old, _, new = line.partition("==>")
            mutants.append(Mutant(file, old.strip(), new.strip(), tests))
        elif line and not line.startswith("#"):
            file, *given = line.split()
            tests = tuple(given) or nearest_tests(file)
    return mutants


def nearest_tests(file: str) -> tuple[str, ...]:
    """Return the tests of a file by the layout: ``tests/<room>/test_<file>*.py``, or else those of
    the whole room.
    """
    room = Path("tests", *Path(file).parts[1:-1])
    named = sorted((ROOT / room).glob(f"test_{Path(file).stem}*.py"))
    return tuple(f"{room}/{path.name}" for path in named) or (str(room),)


def make_tree(folder: str) -> None:
    """Copy the files of the checkout that git knows or would add to a folder of this process; link
    the others.
    """
    global _tree
    _tree = Path(tempfile.mkdtemp(dir=folder))
    listed = subprocess.check_output(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True
    )
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (_tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, _tree / name)
    for path in ROOT.iterdir():
        if not (_tree / path.name).exists():
            (_tree / path.name).symlink_to(path)


def judge(mutant: Mutant) -> tuple[str, str, float]:
    """Return the verdict, the test that failed with the mutant, and the seconds that this took."""
    if _stop.is_set():
        return "not run", "", 0.0
    start, path = time.monotonic(), _tree / mutant.file
    text, changed = path.read_text(), path.stat().st_mtime_ns
    path.write_text(text.replace(mutant.old, mutant.new))
    # Python takes bytecode for current by the size of its source and the second of its change.
    os.utime(path, ns=(changed, changed + next(_seconds) * 10**9))
    try:
        status, failed = run_tests(list(mutant.tests))
    finally:
        path.write_text(text)
        os.utime(path, ns=(changed, changed))
    if status == 0:
        return "survived", "", time.monotonic() - start
    if failed not in _sound:
        _sound[failed] = bool(failed) and run_tests([failed])[0] == 0
    return "killed" if _sound[failed] else "broken", failed, time.monotonic() - start


def run_tests(tests: list[str]) -> tuple[int | None, str]:
    """Run tests in the copy; return pytest's exit status and the id of the first test or file that
    failed.
    """
    failed = _tree / ".failed"
    failed.unlink(missing_ok=True)
    child = multiprocessing.get_context("fork").Process(target=_pytest, args=(tests, failed))
    child.start()
    child.join(1800)  # an endless loop usually ends with --timeout
    child.kill()
    child.join()
    return child.exitcode, failed.read_text() if failed.exists() else ""


def _pytest(tests: list[str], failed: Path) -> None:
    class Recorder:
        def pytest_exception_interact(self, node: pytest.Item | pytest.Collector) -> None:
            if not failed.exists():
                failed.write_text(node.nodeid)

    os.chdir(_tree)
    for stream in (1, 2):
        os.dup2(os.open(_tree / ".output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.path[0] = os.environ["PYTHONPATH"] = str(_tree)
    os._exit(pytest.main([*PYTEST, *tests], plugins=[Recorder()]))


def run(mutants: list[Mutant], results: Path, jobs: int, minutes: float) -> dict[Mutant, str]:
    """Judge the mutants that have no result yet; return the verdicts of all."""
    lines = (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )
    known, digests = (
        {line["digest"]: line["verdict"] for line in lines},
        {one: one.digest() for one in mutants},
    )
    verdicts = {
        one: "stale" if one.is_stale else known.get(digests[one], "not run") for one in mutants
    }
    missing = [one for one in mutants if verdicts[one] == "not run"]
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # before torch is imported
    for package in PACKAGES if missing else ():
        __import__(package)
    end, fork = time.monotonic() + 60 * minutes, multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder, open(results, "a") as file,
        ProcessPoolExecutor(jobs, fork, make_tree, (folder,)) as pool,
    ):  # fmt: skip
        asked = {pool.submit(judge, one): one for one in missing}
        # After the workers were forked: the mutants that are judged now end, the others are left
        # for the next call.
        signal.signal(signal.SIGTERM, lambda *_: _stop.set())
        for future in as_completed(asked):
            one, (verdict, test, seconds) = asked[future], future.result()
            if verdict == "not run":
                continue
            verdicts[one] = verdict
            print(
                json.dumps({"digest": digests[one], "verdict": verdict, "mutant": str(one)}),
                file=file,
                flush=True,
            )
            print(f"{verdict:8} {seconds:5.1f} s  {one}  {test}", flush=True)
            if time.monotonic() > end:
                _stop.set()
    return verdicts


def show(verdicts: dict[Mutant, str]) -> float:
    """Print the counts of each file and what was not killed; return the share of mutants that were
    killed.
    """
    print(f"\n{'file':40}", *(f"{verdict:>9}" for verdict in VERDICTS))
    for file in [*dict.fromkeys(one.file for one in verdicts), "all"]:
        counts = Counter(verdict for one, verdict in verdicts.items() if file in (one.file, "all"))
        print(f"{file:40}", *(f"{counts[verdict] or '':>9}" for verdict in VERDICTS))
    print(
        *(f"{verdict:9} {one}" for one, verdict in verdicts.items() if verdict != "killed"),
        sep="\n",
    )
    print(f"{counts['killed'] / len(verdicts):.1%} of {len(verdicts)} mutants were killed")
    return counts["killed"] / len(verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--jobs", type=int, default=1, help="mutants that are judged at a time (default: 1)"
    )
    parser.add_argument(
        "--only",
        metavar="FILE",
        help="only the mutants of this file, such as slime/data/rewards.py",
    )
    parser.add_argument(
        "--list", action="store_true", help="only print the mutants and their tests"
    )
    parser.add_argument(
        "--minutes", type=float, default=1e6, help="start no mutant after so many minutes"
    )
    parser.add_argument(
        "--results", type=Path, default=ROOT / "outputs" / "mutants.jsonl", help="kept results"
    )
    options = parser.parse_args()
    mutants = [one for one in read_table() if options.only in (None, one.file)]
    if options.list or not mutants:
        print(*(f"{one}  {' '.join(one.tests)}" for one in mutants), sep="\n")
        return 0
    options.results.parent.mkdir(exist_ok=True)
    return int(show(run(mutants, options.results, options.jobs, options.minutes)) < 0.95)


if __name__ == "__main__":
    sys.exit(main())
