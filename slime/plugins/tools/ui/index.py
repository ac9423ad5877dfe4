"""An index of the samples of a run, in SQLite in the user's cache folder.

The texts stay in the run's files: the index has the numbers of each sample, and where its line
begins. A file is read once, and again only if it was replaced. So a page of a run with 100,000
samples needs no more than a query.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson
import xxhash

from slime.data.rewards import PARTS_KEY
from slime.data.staleness import step_of
from slime.observability.files import parse_json, regular, shallow
from slime.observability.samples import COMPRESSED, last_user_text, sample_files, unpacked
from slime.types import JsonObject, JsonValue

SCHEMA = 3
"""Part of the name of the index, so that an index of another release is not read."""

_NAME = re.compile(r"(?P<kind>.+)_(?P<step>[0-9]{1,15})")
_HEAD = 400  # characters of a prompt that the index keeps
_TABLES = """
create table if not exists files (kind text, step integer, mtime integer, size integer, bad integer,
    primary key (kind, step)) without rowid;
create table if not exists samples (kind text, step integer, position integer, group_index integer,
    sample_index integer, reward real, reward_text text, length integer, status text, staleness integer,
    version text, source text, parts text, prompt text,
    offset integer, size integer, primary key (kind, step, position)) without rowid;
create index if not exists of_prompt on samples (prompt, kind, step);
create table if not exists prompts (key text primary key, head text, label text) without rowid;
"""
Row = dict[str, int | float | str | None]

logger = logging.getLogger(__name__)


class SampleIndex:
    """The index of one run. It is thread-safe; two programs may use the same index.

    Args:
        folder: The folder of the run.
        cache: The folder for the index. None, or one that cannot be written: it is kept in memory.
        settings: The flags of the run, of which ``reward_key`` and ``eval_reward_key`` say what a
            reward is.
    """

    def __init__(
        self, folder: Path, cache: Path | None, settings: Mapping[str, object] | None = None
    ) -> None:
        self.folder = folder
        self.settings = settings or {}
        self._lock = threading.RLock()
        self._seen_folder = -1
        self._pending: list[tuple[str, int, Path]] = []
        self.connection = self._open(cache)
        self.version = 0  # grows with every change

    def _open(self, cache: Path | None) -> sqlite3.Connection:
        if cache is not None:
            name = f"{xxhash.xxh64_hexdigest(os.fsencode(self.folder.resolve()))}-{SCHEMA}.sqlite"
            with contextlib.suppress(OSError, sqlite3.Error):
                # The index has the beginnings of prompts, so other users may not read it.
                cache.mkdir(parents=True, exist_ok=True, mode=0o700)
                return _connect(str(cache / name))
        return _connect(":memory:")

    # --- building
    # ------------------------------------------------------------------------------------

    def refresh(self, most: int | None = None) -> int:
        """Read new and changed files, the newest first.

        Args:
            most: So many files at most; None reads all.

        Returns:
            The number of files that remain to be read.
        """
        with self._lock:
            # The list is made once, and read in pieces between which others get the lock.
            if not self._pending:
                self._pending = self._changed()
            todo = self._pending[: len(self._pending) if most is None else most]
            self._pending = self._pending[len(todo) :]
        for kind, step, path in todo:
            try:
                self.read_file(kind, step, path)
            except Exception:  # one damaged file must not keep the others from the index
                logger.exception(f"{path} could not be indexed")
        return len(self._pending)

    def _changed(self) -> list[tuple[str, int, Path]]:
        try:  # files are replaced and never changed in place, so the time of the folder tells
            stamp = (self.folder / "samples").stat().st_mtime_ns
        except OSError:
            return []
        if stamp == self._seen_folder:
            return []
        self._seen_folder = stamp
        # What the index has against what is there.
        query = self.connection.execute("select kind, step, mtime, size from files")
        known = {(kind, step): (mtime, size) for kind, step, mtime, size in query}
        on_disk: dict[tuple[str, int], Path] = {}
        for name, path in sample_files(self.folder).items():
            match = _NAME.fullmatch(name)
            if match:
                on_disk[match["kind"], int(match["step"])] = path
        for kind, step in known.keys() - on_disk.keys():
            self._forget(kind, step)
        changed = [
            (kind, step, path)
            for (kind, step), path in on_disk.items()
            if known.get((kind, step)) != _stamp(path)
        ]
        return sorted(changed, key=lambda entry: (-entry[1], entry[0]))

    def _forget(self, kind: str, step: int) -> None:
        with self.connection:
            self.connection.execute("delete from samples where kind = ? and step = ?", (kind, step))
            self.connection.execute("delete from files where kind = ? and step = ?", (kind, step))
        self.version += 1

    def ensure(self, kind: str, step: int) -> Path | None:
        """Read the file of one step now, if it is new or changed, and return its path; None if
        there is none.
        """
        query = "select mtime, size from files where kind = ? and step = ?"
        path = self._path(kind, step)
        if path is None:
            return None
        with self._lock:
            known = self.connection.execute(query, (kind, step)).fetchone()
            if known != _stamp(path):
                self.read_file(kind, step, path)
        return path

    def _path(self, kind: str, step: int) -> Path | None:
        """Return the file of a step. ``kind`` comes from a request, so it is compared with names
        that exist.
        """
        name = f"{kind}_{step:06d}.jsonl"
        for path in (self.folder / "samples" / name, self.folder / "samples" / (name + COMPRESSED)):
            # a name that is too long, or that has a NUL
            with contextlib.suppress(OSError, ValueError):
                if path.parent == self.folder / "samples" and "/" not in kind and path.is_file():
                    return path
        return None

    def read_file(self, kind: str, step: int, path: Path) -> None:
        stamp = _stamp(path)
        try:
            lines = _lines(path)
        except OSError:
            return
        # remembered as one bad line, so that it is not read for every request
        except ValueError as error:
            logger.warning("not indexed: %s", error)
            lines = [b"-"]
        # Numbers of each sample go to the index with the place of its line; its texts stay in the
        # file.
        rows: list[tuple[object, ...]] = []
        prompts: dict[str, tuple[str, str, str]] = {}
        key = self.settings.get("reward_key")
        reward_key = (
            self.settings.get("eval_reward_key") or key if kind.startswith("eval-") else key
        )
        bad = offset = 0
        for position, line in enumerate(lines):
            record = _record(line)
            if record is None:
                bad += bool(line)
            else:
                name, text = _prompt_of(record)
                prompts[name] = (name, text[:_HEAD], _text(record.get("label"))[:_HEAD])
                rows.append(
                    (
                        kind,
                        step,
                        position,
                        *_numbers(record, step, reward_key),
                        name,
                        offset,
                        len(line),
                    )
                )
            offset += len(line) + 1
        # A file is replaced as a whole, so that its old rows go first.
        with self._lock, self.connection as connection:
            connection.execute("delete from samples where kind = ? and step = ?", (kind, step))
            marks = ", ".join("?" * 16)
            connection.executemany(f"insert into samples values ({marks})", rows)
            connection.executemany(
                "insert or ignore into prompts values (?, ?, ?)", prompts.values()
            )
            connection.execute(
                "insert or replace into files values (?, ?, ?, ?, ?)", (kind, step, *stamp, bad)
            )
            self.version += 1

    # --- queries
    # -------------------------------------------------------------------------------------

    def rows(self, query: str, values: Sequence[object] = ()) -> list[Row]:
        """Return the rows of a query as dicts."""
        with self._lock:
            cursor = self.connection.execute(query, values)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def sample(self, kind: str, step: int, position: int) -> JsonObject | None:
        """Return the record of a sample as its file has it; None if there is none."""
        path = self.ensure(kind, step)
        where = "kind = ? and step = ? and position = ?"
        places = self.rows(
            f"select offset, size from samples where {where}", (kind, step, position)
        )
        if path is None or not places:
            return None
        # A compressed file has no places.
        if path.suffix == COMPRESSED:
            return _record(_lines(path)[position])
        with regular(path).open("rb") as file:
            file.seek(int(places[0]["offset"] or 0))
            return _record(file.read(int(places[0]["size"] or 0)))

    @property
    def pending(self) -> int:
        """Number of files that are known and not read yet."""
        return len(self._pending)

    def close(self) -> None:
        with self._lock:
            self.connection.close()


def _connect(name: str) -> sqlite3.Connection:
    connection = sqlite3.connect(name, check_same_thread=False, timeout=30)
    try:
        # after a crash of the machine, the index is made again
        connection.execute("pragma synchronous = off")
        connection.executescript(_TABLES)
        connection.execute("select count(*) from files").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        raise
    except sqlite3.DatabaseError:  # the file is damaged, or not an index
        connection.close()
        Path(name).unlink()
        return _connect(name)
    return connection


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return -1, -1
    return status.st_mtime_ns, status.st_size


def _lines(path: Path) -> list[bytes]:
    if path.suffix != COMPRESSED:
        return regular(path).read_bytes().split(b"\n")
    return unpacked(path).split(b"\n")


def _record(line: bytes) -> JsonObject | None:
    try:
        try:
            value = shallow(orjson.loads(line))
        except orjson.JSONDecodeError:  # a lone surrogate or NaN, which orjson refuses
            value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _prompt_of(record: JsonObject) -> tuple[str, str]:
    """Return a key that is the same for equal prompts, and the text of the user's last turn."""
    prompt = record.get("prompt")
    # Equal prompts of different rows have their keys in any order.
    packed = json.dumps(prompt, sort_keys=True, separators=(",", ":")).encode()
    messages = (
        [message for message in prompt if isinstance(message, Mapping)]
        if isinstance(prompt, list)
        else None
    )
    text = last_user_text(messages if messages is not None else _text(prompt))
    return xxhash.xxh64_hexdigest(packed), _text(" ".join(text.split()))


def _text(value: JsonValue) -> str:
    if value is None:
        return ""  # as of a row without a label
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()


def _numbers(record: JsonObject, step: int, reward_key: object) -> tuple[object, ...]:
    """Return the columns ``group_index`` to ``parts`` of a sample."""
    # The age of the oldest token, in steps.
    versions = _versions(record)
    made = [number for version in versions if (number := step_of(version)) is not None]
    reward = record.get("reward")
    status = record.get("status")
    return (
        _integer(record.get("group_index")),
        _integer(record.get("index")),
        reward_number(reward, reward_key),
        _text(reward)[:_HEAD] if isinstance(reward, dict | list | str) else None,
        _integer(record.get("response_length")),
        _text(status) if isinstance(status, str) else None,
        step - min(made) if made else None,
        _text(" ".join(versions))[:_HEAD],
        *_labels(record.get("metadata")),
    )


def _labels(metadata: JsonValue) -> tuple[str | None, str | None]:
    """Return the data set of a sample, and its several rewards as JSON; None where it has none."""
    if not isinstance(metadata, dict):
        return None, None
    source = metadata.get("source_name")
    parts = metadata.get(PARTS_KEY)
    numbers = {
        name: number
        for name, value in (parts.items() if isinstance(parts, dict) else ())
        if (number := reward_number(value)) is not None
    }
    return (
        None if source is None else _text(source)[:_HEAD],
        json.dumps(numbers) if numbers else None,
    )


def spans_of(record: JsonObject) -> list[list[object]]:
    """Return ``[version, start, end]`` of a sample's record: which weights generated which tokens
    of the response.
    """
    spans = record.get("version_spans")
    return (
        [list(span) for span in spans if isinstance(span, list)] if isinstance(spans, list) else []
    )


def _versions(record: JsonObject) -> list[str]:
    versions = record.get("weight_versions")
    of_spans = [str(span[0]) for span in spans_of(record) if span]
    return sorted({*of_spans, *(map(str, versions) if isinstance(versions, list) else ())})


def _integer(value: JsonValue) -> int | None:
    # as large as SQLite takes
    return value if isinstance(value, int) and abs(value) < 2**63 else None


def reward_number(reward: JsonValue, key: object = None) -> float | None:
    """Return a reward as a number; None if there is none, or if it is not finite.

    Args:
        key: ``--reward-key``, which names the entry of a dict. Without it, the entry is ``score``
            or the first number.
    """
    if isinstance(reward, dict):
        first = next((value for value in reward.values() if isinstance(value, int | float)), None)
        reward = reward.get(str(key)) if key else reward.get("score", first)
    if not isinstance(reward, bool | int | float):
        return None
    value = float(reward)
    return value if abs(value) < float("inf") else None
