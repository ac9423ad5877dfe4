"""Folders of runs that somebody else has made: giant and deep files, links into the kernel, texts
that command.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slime.cli.main import main
from slime.observability.debug_data import DebugDataError, file_of_rollout, load_rollout
from slime.observability.files import (
    DEEPEST,
    MOST_BYTES,
    MOST_SETTINGS,
    parse_json,
    parse_settings,
    regular,
    shown,
)
from slime.observability.run_dir import UnreadableRun, read_settings
from slime.plugins.tools.summary import find_dump
from slime.plugins.tools.ui import NotFound, answer, as_json, path_of
from slime.plugins.tools.ui.runs import NoRuns, Runs

MADE = Path(__file__).parents[1] / "plugins" / "tools" / "ui" / "tiny"
DEEP = "[" * 100_000
PAGES = (
    "overview",
    "doctor",
    "steps",
    "step/0",
    "prompts",
    "evaluations",
    "ledger",
    "engines",
    "sample/rollout/0/0",
)
COMMANDS = (
    ["doctor"],
    ["doctor", "--json"],
    ["summary"],
    ["summary", "--json"],
    ["ledger"],
    ["ledger", "--json"],
)
Run = Path


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = tmp_path / "tiny"
    shutil.copytree(MADE, folder)
    return folder


def sparse(path: Path, size: int) -> None:
    path.unlink(missing_ok=True)
    path.touch()
    os.truncate(path, size)


def read_everything(run: Run) -> None:
    """Use all readers of a folder in this process, with memory for sane files only."""
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, limit[1]))
    try:
        for words in COMMANDS:
            assert main([words[0], str(run), *words[1:]]) in (0, 1)
        assert main(["replay", str(run), "--step", "0"]) == 1
        with contextlib.suppress(NoRuns):
            runs = Runs([run], None)
            for page in PAGES:
                with contextlib.suppress(NotFound, NoRuns):
                    as_json(answer(runs, path_of("run", run.name, *page.split("/"))))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


@pytest.mark.real
@pytest.mark.parametrize(
    "text",
    [
        DEEP,
        "- " * 100_000,
        "? " * 100_000,
        "{a: " * 50_000,
        "a: &x [&y [1]]\nb: [*x, *x]\n",
        "a: 1\n" * 2_000_000,
    ],
    ids=["brackets", "dashes", "keys", "braces", "aliases", "giant"],
)
def test_settings_that_overflow_a_parser_are_refused_in_words(run: Run, text: str) -> None:
    (run / "config.yaml").write_text(text)
    for words in (["doctor"], ["ui", "--export", str(run.parent / "page.html")]):
        command = [sys.executable, "-m", "slime.cli.main", words[0], str(run), *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr[-2000:]
    with pytest.raises(UnreadableRun, match=r"config\.yaml"):
        read_settings(run / "config.yaml")


ROWS = (
    "state.json",
    "summary.json",
    "metrics.jsonl",
    "ledger.jsonl",
    "attempts.jsonl",
    "weights.jsonl",
)
ROWS += ("engines.jsonl", "eval/eval_000000.json", "samples/rollout_000000.jsonl")
FILES = ("config.yaml", *(name for name in ROWS if name != "weights.jsonl"), "logs/driver.log")


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("depth", [DEEPEST + 1, pytest.param(900, marks=pytest.mark.long), 100_000])
def test_deep_rows_are_left_out_or_named(run: Run, name: str, depth: int) -> None:
    file = run / name
    file.parent.mkdir(exist_ok=True)
    deep = "[" * depth + "]" * depth
    known = (
        '"rollout/step": 0, "group": 1, "state": "trained", "prompt": 1, "settled": 1, '
        '"seconds_total": 1'
    )
    file.write_text(
        f'{{{known}, "datasets": {{"a": {{"metrics": {deep}}}}}, "reward": {deep}, "rollout": '
        f"{deep}}}\n"
    )
    read_everything(run)


KINDS = ("giant", "/dev/zero", "pipe", "/proc/self/mem", "/proc/self/environ", "/proc/kmsg")


def kinds_of(name: str) -> tuple[str, str]:
    """Of each file, a giant one and one that never ends: a device, or a pipe."""
    return "giant", ("/dev/zero", "pipe")[FILES.index(name) % 2]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if kind in kinds_of(name) else (pytest.mark.long,))
        for name in FILES
        for kind in KINDS
    ],
)
def test_giant_files_and_links_into_the_kernel_are_not_read(run: Run, name: str, kind: str) -> None:
    file = run / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    if kind == "giant":
        sparse(file, 6 * 2**30)
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(kind)
    read_everything(run)


def test_sizes(tmp_path: Path) -> None:
    file = tmp_path / "file"
    sparse(file, MOST_BYTES + 1)
    with pytest.raises(OSError, match="more than"):
        regular(file)
    sparse(file, MOST_SETTINGS)
    assert regular(file) == regular(file, MOST_SETTINGS) == file
    with pytest.raises(OSError, match="Not a regular file"):
        regular(Path("/proc/self/mem"))


def test_depths() -> None:
    assert parse_json("[" * DEEPEST + "]" * DEEPEST) and parse_settings(
        "[" * DEEPEST + "]" * DEEPEST
    )
    assert parse_json(json.dumps({"text": "[" * 5000, "tokens": list(range(5000))}))
    for parse in (parse_json, parse_settings):
        with pytest.raises(ValueError, match="too deeply"):
            parse("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1))


@pytest.mark.parametrize(
    "template",
    [
        "{rollout_id.real}",
        "{rollout_id:9999999999}",
        "{rollout_id:999999999d}",
        "{rollout_id!r:>99999999}",
        "{0}",
        "{",
        "}",
    ],
)
def test_a_template_is_no_format_string(tmp_path: Path, template: str) -> None:
    assert find_dump(template, tmp_path, "run", 0) is None
    with pytest.raises(DebugDataError, match=r"only \{rollout_id\}"):
        load_rollout(template, 0)


def test_templates() -> None:
    assert str(file_of_rollout("a/{rollout_id}/{rollout_id:04d}.pt", 7)) == "a/7/0007.pt"
    assert str(file_of_rollout("{rollout_id:04d}.pt", "eval_7")) == "eval_7.pt"


ESCAPE = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m\u202e"


def test_texts_of_a_folder_do_not_command_the_terminal(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = run / "logs"
    logs.mkdir(exist_ok=True)
    (logs / f"driver{ESCAPE}.log").write_text(
        f"Traceback (most recent call last):\nRuntimeError: {ESCAPE}\n"
    )
    state = json.loads((run / "state.json").read_text()) if (run / "state.json").is_file() else {}
    (run / "state.json").write_text(
        json.dumps({**state, "status": "failed", "error": f"E: {ESCAPE}", "phase": ESCAPE})
    )
    rows = (run / "metrics.jsonl").read_text()
    row = {"eval/step": 1, f"eval/set{ESCAPE}[/x]/reward": 0.5, f"eval/set{ESCAPE}": 0.5}
    (run / "metrics.jsonl").write_text(rows + json.dumps(row) + "\n")
    line = {"group": ESCAPE, "state": f"[/x]{ESCAPE}", "rollout": 0, "versions": [ESCAPE]}
    lines = [
        json.dumps(line),
        json.dumps(line),
        json.dumps({"rolled_back": {"attempt": ESCAPE, "after": ESCAPE, "rows": 1, "groups": []}}),
    ]
    (run / "ledger.jsonl").write_text("\n".join(lines) + "\n")
    for command in COMMANDS:
        main([command[0], str(run), *command[1:]])
    for path in (run / f"no{ESCAPE}", Path(f"{ESCAPE}")):
        for command in ("doctor", "summary", "ledger"):
            assert main([command, str(path)]) == 1
    printed = "".join(capfd.readouterr())
    assert "set" in printed and not set(printed) & set("\x1b\x07\x9b\u202e")


def test_lines_and_tabs_stay() -> None:
    assert shown("a\tb\nc é 字 \x1b[2J") == "a\tb\nc é 字 �[2J"
