"""The certificate of a run: a digest of everything that each step is made of, chained by hash.

``certificate.jsonl`` has one JSON object for the run and one for each step, each with the SHA-256
of the line before it, so that the last hash stands for the whole run.
"""

from __future__ import annotations

import hashlib
import json
import site
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path

from slime.checkpoint.ledger import parse_line
from slime.observability.files import best_effort, replacing
from slime.observability.metrics import MetricsError, read_metrics
from slime.observability.run_dir import RunDir, read_settings

from ..summary import read_weights
from . import (
    ReplayError,
    attempt_of,
    attempts_of,
    template_of,
)

FILE = "certificate.jsonl"
Link = dict[str, object]


def certify(run: RunDir) -> None:
    """Write the certificate of a run that has the flag."""
    if read_settings(run.config).get("certificate"):
        with best_effort(FILE), replacing(run.path / FILE) as temporary:
            lines = (json.dumps(link) for link in chained(links(run)))
            temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def links(run: RunDir, packages: Mapping[str, str] | None = None) -> Iterator[Link]:
    """Yield what the files of a run say: of the run, then of each step that has any row.

    Args:
        packages: The versions that the run had; None for those that are installed.

    Raises:
        ReplayError, MetricsError: A file is not readable.
    """
    attempts = attempts_of(run.path)
    versions = packages or version_of_all()
    data = _paths(attempts[0].settings.get("prompt_data"), attempts[0].settled.working_directory)
    yield {
        "settings": _digest(run.attempts.read_bytes()),
        "packages": dict(sorted(versions.items())),
        "data": {str(path): _digest(path.read_bytes()) for path in data if path.is_file()},
    }
    rows: dict[int, list[object]] = {}
    for row in read_metrics(run.metrics):
        if row.get("rollout/step") is not None:
            rows.setdefault(int(row["rollout/step"]), []).append(row)
    groups: dict[int, list[object]] = {}
    for line in run.ledger.read_bytes().splitlines() if run.ledger.is_file() else ():
        if "group" in (entry := parse_line(line)):
            groups.setdefault(int(entry.get("rollout", -1)), []).append(entry)
    weights = read_weights(run.weights)
    for step in sorted(rows.keys() | groups.keys()):
        template = template_of(attempt_of(attempts, step))
        dump = Path(str(template).replace("{rollout_id}", str(step)))
        sent = weights.get(step + 1)
        yield {
            "step": step,
            "metrics": _digest(rows.get(step)),
            "ledger": _digest(groups.get(step)),
            "samples": _digest(dump.read_bytes() if dump.is_file() else None),
            "weights": _digest(None if sent is None else asdict(sent)),
        }


def verify_run(
    folder: Path, steps: Sequence[int], run_its_code: Callable[[Sequence[str]], None] | None
) -> Iterator[tuple[str, bool]]:
    """Compare the files of a run with its certificate, and compute steps of it again.

    Yields lines, each with whether what it says is good.

    Raises:
        ReplayError: There is no certificate, or a file of the run is not readable.
        RankError: A training rank failed.
    """
    from . import read_run
    from .step import Wanted, replay_step

    try:
        found, last = problems(RunDir(folder))
    except MetricsError as error:
        raise ReplayError(str(error)) from error
    yield f"certificate: {'DIFFERS' if found else 'holds'}; its last hash is {last}", not found
    yield from ((f"    {problem}", False) for problem in found)
    yield from ((f"    {change}", True) for change in other_versions(RunDir(folder)))
    for step in steps:
        try:
            run = read_run(folder, step, (), run_its_code)
            result = replay_step(run, Wanted(step, through=True))
        except ReplayError as error:
            yield f"step {step}: cannot be computed again: {error}", False
            continue
        how = "bit for bit" if result.tolerance == 0 else f"within {result.tolerance:g}"
        said = f"equal, {how}" if result.equal else f"DIFFERS, first in {result.first}"
        yield f"step {step}: {said}", result.equal


def other_versions(run: RunDir) -> Iterator[str]:
    """Yield the packages of the certificate of which another version is installed now, or none.

    They make no certificate wrong, but may be why a step that is computed again differs.
    """
    packages = parse_line((run.path / FILE).read_bytes().splitlines()[0]).get("packages")
    now = version_of_all()
    for name, version in packages.items() if isinstance(packages, dict) else ():
        if now.get(name) != version:
            yield f"package {name}: {version} in the run, {now.get(name, 'not installed')} now"


def version_of_all() -> dict[str, str]:
    """Return the version of each installed package by its name in lower case; not of those that
    Ray and setuptools carry along, because only a process that has imported these sees them.
    """
    installed = distributions(path=[*site.getsitepackages(), site.getusersitepackages()])
    return {one.name.lower(): one.version for one in installed}


def _paths(named: object, directory: str) -> Sequence[Path]:
    names = named if isinstance(named, list) else [named]
    return [Path(directory) / str(name) for name in names if name]


def _digest(value: object) -> str | None:
    """Return the SHA-256 of bytes, or of a value as JSON; None for None."""
    if value is None:
        return None
    text = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()


def chained(entries: Iterator[Link]) -> Iterator[Link]:
    """Yield entries with the hash of the entry before, and their own."""
    before: str | None = None
    for entry in entries:
        link = {**entry, "before": before}
        before = _digest(link)
        yield {**link, "hash": before}


def problems(run: RunDir) -> tuple[list[str], str]:
    """Return what in the folder of a run is not what its certificate says, and the last hash.

    Raises:
        ReplayError: There is no certificate, or a file of the run is not readable.
    """
    path = run.path / FILE
    if not path.is_file():
        raise ReplayError(f"{run.path} has no {FILE}: the run had no --certificate, or did not end")
    recorded = [parse_line(line) for line in path.read_bytes().splitlines()]
    chain = chained(
        {key: value for key, value in link.items() if key not in ("before", "hash")}
        for link in recorded
    )
    differences = [
        f"{FILE}, line {number}: it does not follow from the line before"
        for number, (link, right) in enumerate(zip(recorded, chain, strict=True), start=1)
        if link != right
    ]
    known: dict[object, Link] = {link.get("step"): link for link in recorded}
    packages = known.get(None, {}).get("packages")
    now = {
        link.get("step"): link
        for link in links(run, packages if isinstance(packages, dict) else {})
    }
    for step in sorted(known.keys() | now.keys(), key=str):
        one = known.get(step, {})
        other = now.get(step, {})
        where = "the run" if step is None else f"step {step}"
        for name in (other | one).keys() - {"step", "before", "hash"}:
            if one.get(name) != other.get(name):
                lost = other.get(name) is None
                what = "missing" if lost else "not what the certificate says"
                differences.append(f"{where}: {name} {what}")
    return differences, str(recorded[-1].get("hash") if recorded else "")
