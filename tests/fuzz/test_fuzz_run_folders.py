"""Damaged folders of runs: the page and the commands that read them say what is wrong, never with a
traceback.

The folder is that of ``tests/plugins/tools/ui``, with a record of its attempts. A case damages up
to three files, then runs one of the commands and asks for some addresses of ``slime ui``.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from odd_values import TEXTS, numbers, value

from slime.cli.main import main
from slime.observability.run_dir import RunDir
from slime.observability.run_state import Settled
from slime.plugins.tools.ui import NotFound, answer, as_json, path_of
from slime.plugins.tools.ui.runs import NoRuns, Runs

CHUNKS = 10
MADE = Path(__file__).parents[1] / "plugins" / "tools" / "ui" / "tiny"
SETTLED = Settled(True, False, 4, 1, None, None, 0, None, "/nowhere")
COMMANDS = (
    ("doctor",),
    ("doctor", "--json"),
    ("ledger",),
    ("ledger", "--json"),
    ("summary",),
    ("summary", "--json"),
    ("replay", "--step", "2"),
)
PAGES = ("overview", "doctor", "steps", "prompts", "evaluations", "ledger", "engines")
SECRET = "a-token-of-the-reader"
Random = random.Random


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzzed-runs") / "tiny"
    shutil.copytree(MADE, folder, ignore=shutil.ignore_patterns("*.png"))
    run = RunDir(folder)
    settings = yaml.safe_load(run.config.read_text())
    line = json.dumps({"settled": vars(SETTLED), "settings": settings})
    run.attempts.write_text(line + "\n")
    load = {"time": 1.0, "engines": [{"engine": 0, "running": 1, "waiting": 0, "tokens": 4}]}
    run.engines.write_text(json.dumps(load) + "\n")
    return folder


def in_json(random_: Random, text: str) -> str:
    """Change a value somewhere in a JSON text."""
    try:
        content = json.loads(text)
    except ValueError:
        return text
    place = content
    while isinstance(place, (dict, list)) and place:
        key = (
            random_.choice(sorted(place))
            if isinstance(place, dict)
            else random_.randrange(len(place))
        )
        if not isinstance(place[key], (dict, list)) or not place[key] or random_.random() < 0.3:
            kind = random_.randrange(8)
            if kind == 0:
                del place[key]
            else:
                place[key] = "\ud800" if kind == 1 else value(random_)
            return json.dumps(content)
        place = place[key]
    return json.dumps(value(random_))


def in_lines(random_: Random, content: bytes) -> bytes:
    lines = content.decode(errors="replace").splitlines()  # it may be damaged already
    if not lines:
        return content
    at = random_.randrange(len(lines))
    kind = random_.randrange(6)
    if kind == 0:
        lines[at] = json.dumps(value(random_))
    elif kind == 1:
        lines.insert(at, random_.choice(TEXTS))
    elif kind == 2:
        lines.insert(at, lines[random_.randrange(len(lines))])
    else:
        lines[at] = in_json(random_, lines[at])
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def in_yaml(random_: Random, content: bytes) -> bytes:
    if random_.random() < 0.2:
        return yaml.safe_dump(value(random_)).encode()
    settings = yaml.safe_load(content)
    for _ in range(random_.randrange(1, 4)):
        settings[random_.choice(sorted(settings))] = value(random_)
    return yaml.safe_dump(settings).encode()


def in_bytes(random_: Random, content: bytes) -> bytes:
    at = random_.randrange(max(len(content), 1))
    kind = random_.randrange(5)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + random_.randbytes(random_.randrange(1, 9)) + content[at:]
    if kind == 2:
        return (
            content[:at] + bytes([content[at] ^ (1 << random_.randrange(8))]) + content[at + 1 :]
            if content
            else b"\0"
        )
    if kind == 3:
        return b"\xff\xfe" + content.decode("utf-8", "replace").encode("utf-16-le")
    return b"\0" * 40 + content[at:]


def spoil(random_: Random, folder: Path) -> str:
    """Damage one file of the folder, and say how."""
    file = random_.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    content, name = file.read_bytes(), str(file.relative_to(folder))
    kind = random_.choice(
        ("content", "content", "content", "bytes", "gone", "folder", "link", "pipe", "renamed")
    )
    if kind == "content" and file.suffix in (".json", ".gz"):
        try:
            text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode()
        except (OSError, EOFError, ValueError, zlib.error):
            kind = "bytes"  # it is damaged already
    if kind == "content" and file.suffix == ".jsonl":
        file.write_bytes(in_lines(random_, content))
    elif kind == "content" and file.suffix == ".json":
        file.write_bytes(in_json(random_, text).encode())
    elif kind == "content" and file.suffix == ".gz":
        file.write_bytes(gzip.compress(in_json(random_, text).encode(), 1))
    elif kind == "content" and file.suffix == ".yaml":
        file.write_bytes(in_yaml(random_, content))
    elif kind in ("content", "bytes"):
        file.write_bytes(in_bytes(random_, content))
    elif kind == "renamed":  # a step or a kind that the name has wrongly
        new = random_.choice(
            ("rollout_-00001", "rollout_999999999999999999999", "eval-_000001", "rollout_00٣", "x")
        )
        file.rename(file.with_name(new + "".join(file.suffixes)))
    else:
        file.unlink()
        if kind == "folder":
            file.mkdir()
        elif kind == "link":
            secret = folder.parents[1] / "secret"
            secret.write_text(SECRET)
            file.symlink_to(random_.choice(("/dev/null", file.name, "nothing", "..", secret)))
        elif kind == "pipe":  # reading it waits for a writer
            os.mkfifo(file)
    return f"{kind} of {name}"


def addresses(random_: Random) -> Iterator[str]:
    key, odd = "tiny", random_.choice(TEXTS)
    yield "/api/runs"
    yield from (path_of("run", key, page) for page in PAGES)
    step, other = random_.randrange(6), random_.randrange(6)
    for parts in (
        ("series", random_.choice(("rollout/reward", "train/loss", "perf/step_time", odd))),
        ("step", step),
        ("timeline", step),
        ("sample", random_.choice(("rollout", "eval-products", odd)), step, other),
        ("tokens", step, random_.randrange(40)),
        ("prompt", random_.choice(("0", "1", odd))),
        ("evaluation", random_.choice(("products", odd)), 0, 4),
        ("step", odd),
        (odd, odd),
    ):
        yield path_of("run", key, *parts)
    yield "/" + odd


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_pages_and_commands(
    base: Path, tmp_path: Path, chunk: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for case in numbers(chunk, CHUNKS):
        random_, folder = Random(f"run folder {case}"), tmp_path / "outputs" / "tiny"
        shutil.copytree(base, folder)
        damage = [spoil(random_, folder) for _ in range(random_.randrange(1, 4))]
        asked = random_.choice(COMMANDS)
        try:
            status = main([asked[0], str(folder), *asked[1:]])
            said = capsys.readouterr()
            assert status in (0, 1) and (status == 0 or said.out or said.err), (case, damage, asked)
            assert "Traceback" not in said.err, (case, damage, asked, said.err)
            assert asked[0] != "doctor" or SECRET not in said.out + said.err, (case, damage)
            ask(folder, random_)
        except AssertionError:
            raise
        except BaseException as error:
            raise AssertionError(f"case {case}: {damage}, {asked}") from error
        shutil.rmtree(tmp_path / "outputs")


def ask(folder: Path, random_: Random) -> None:
    """Ask for the pages of a folder. Only addresses of what is not there are refused, and every
    answer is JSON.
    """
    try:
        runs = Runs([folder.parent], None)
    except NoRuns:
        return
    try:
        runs.refresh()
        for path in addresses(random_):
            try:
                found = answer(runs, path)
            except NotFound:
                continue
            except Exception as error:
                raise RuntimeError(path) from error
            json.loads(as_json(found))
    finally:
        runs.close()
