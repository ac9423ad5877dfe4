"""The page as one file."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path

import pytest

from slime.cli.main import main
from slime.observability.files import replacing
from slime.plugins.tools.ui import Limits, as_json, evenly, export
from slime.plugins.tools.ui.runs import Runs

HOSTILE = "</script><script>document.title = 'owned'</script><img src=x onerror=alert(1)>"


def held(html: str) -> dict:
    packed = re.search(r'id="slime-export">([^<]*)</script>', html)
    assert packed is not None
    found: dict = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return found


def answers_in(html: str) -> dict[str, dict]:
    found: dict[str, dict] = held(html)["answers"]
    return found


def test_the_file_holds_every_view(runs: Runs) -> None:
    answers = answers_in(export(runs, Limits()))
    for name in (
        "overview",
        "doctor",
        "steps",
        "step/3",
        "timeline/0",
        "evaluation/products/0/4",
        "ledger",
        "engines",
    ):
        assert f"/api/run/tiny/{name}" in answers
    assert sum("/sample/rollout/" in path for path in answers) == 32
    assert sum("/tokens/" in path for path in answers) == 32


def test_the_limits_hold(runs: Runs) -> None:
    answers = answers_in(export(runs, Limits(steps=2, samples=3)))
    assert [path for path in answers if "/step/" in path] == [
        "/api/run/tiny/step/0",
        "/api/run/tiny/step/3",
    ]
    assert sum("/sample/rollout/" in path for path in answers) == 6
    html = export(runs, Limits(megabytes=0))
    assert not any("/sample/" in path for path in answers_in(html))
    made = held(html)["made"]
    assert "left out" in made


def test_a_prompt_of_several_steps_takes_its_room_once(runs: Runs, folder: Path) -> None:
    first = (folder / "samples" / "rollout_000000.jsonl").read_bytes()
    for step in (1, 2, 3):
        with replacing(folder / "samples" / f"rollout_{step:06d}.jsonl") as temporary:
            temporary.write_bytes(first)
    whole = answers_in(export(runs, Limits()))
    megabytes = sum(map(len, map(as_json, whole.values()))) / 1e6
    assert sum("/prompt/" in path for path in whole) > 1
    assert answers_in(export(runs, Limits(megabytes=megabytes * 1.01))).keys() == whole.keys()


def test_no_text_of_a_run_is_html(runs: Runs, folder: Path) -> None:
    path = folder / "samples" / "rollout_000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["response"], rows[0]["prompt"], rows[0]["label"] = HOSTILE, HOSTILE, HOSTILE
    with replacing(path) as temporary:  # as a run does
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = export(runs, Limits())
    assert "owned" not in html and "onerror" not in html
    assert answers_in(html)["/api/run/tiny/sample/rollout/1/0"]["record"]["response"] == HOSTILE


def test_the_command(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    file = tmp_path / "run.html"
    assert (
        main(
            [
                "ui",
                str(folder),
                "--export",
                str(file),
                "--export-steps",
                "1",
                "--export-samples",
                "2",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.strip() == str(file)
    assert sum("/sample/rollout/" in path for path in answers_in(file.read_text())) == 2
    assert list((tmp_path / "home" / "slime" / "ui").iterdir())
    assert main(["ui", str(tmp_path / "none")]) == 1
    assert "no folder" in capsys.readouterr().err
    assert main(["ui", str(folder), "--export", str(tmp_path / "run.html" / "x")]) == 1
    assert "cannot write" in capsys.readouterr().err
    assert main(["ui", str(folder), "--host", "192.0.2.1"]) == 1  # no machine has this address
    assert "address" in capsys.readouterr().err


def test_items_at_even_distances() -> None:
    assert [evenly(range(10), most) for most in (0, 1, 2, 4, 10, 20)] == [
        [], [9], [0, 9], [0, 3, 6, 9], list(range(10)), list(range(10)),
    ]  # fmt: skip
