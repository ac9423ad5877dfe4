"""The certificate of a run: what of a run cannot be changed, lost or added afterwards unseen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.cli.main import main
from slime.observability.run_dir import RunDir
from slime.observability.run_state import Settled
from slime.plugins.tools.replay import ReplayError
from slime.plugins.tools.replay.certificate import (
    certify,
    other_versions,
    problems,
    version_of_all,
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """The files of a run of three steps, as it leaves them, with their certificate."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text("certificate: true\n")
    (tmp_path / "data.jsonl").write_text("{}\n")
    settled = Settled(False, False, 3, 2, 4096, 4096, 0, None, str(tmp_path))
    settings = {
        "prompt_data": "data.jsonl",
        "save_debug_rollout_data": "{rollout_id}.pt",
        "seed": 7,
    }
    write_lines(run.attempts, [{"settled": vars(settled), "settings": settings}])
    write_lines(run.metrics, [{"rollout/step": n, "train/loss": 0.5 * n} for n in range(3)])
    rows = [{"group": n, "state": "trained", "asked": n, "rollout": n} for n in range(3)]
    write_lines(run.ledger, [*rows, {"cut": 2}])
    sent = [{"version": f"0.{n}", "digest": f"{n}", "dtype": None, "tensors": 1} for n in range(4)]
    write_lines(run.weights, sent)
    for step in range(3):
        (tmp_path / f"{step}.pt").write_bytes(bytes([step]))
    certify(run)
    return run


def write_lines(path: Path, lines: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_untouched_run_is_what_its_certificate_says(run: RunDir) -> None:
    found, last = problems(run)
    assert found == []
    links = lines_of(run.path / "certificate.jsonl")
    assert (
        len(links) == 4 and links[-1]["hash"] == last and links[-1]["before"] == links[-2]["hash"]
    )
    assert links[0]["packages"]["torch"] and len(links[0]["data"]) == 1


def edited(path: Path, number: int, **values: object) -> None:
    lines = lines_of(path)
    lines[number] |= values
    write_lines(path, lines)


def without(path: Path, number: int) -> None:
    lines = lines_of(path)
    del lines[number]
    write_lines(path, lines)


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (lambda run: (run.path.parent / "1.pt").write_bytes(b"x"), "step 1: samples not"),
        (lambda run: (run.path.parent / "2.pt").unlink(), "step 2: samples missing"),
        (lambda run: edited(run.metrics, 1, **{"train/loss": 0.4}), "step 1: metrics not"),
        (lambda run: without(run.metrics, 0), "step 0: metrics missing"),
        (lambda run: without(run.ledger, 1), "step 1: ledger missing"),
        (lambda run: edited(run.ledger, 2, state="filtered"), "step 2: ledger not"),
        (lambda run: edited(run.weights, 2, digest="x"), "step 1: weights not"),
        (lambda run: edited(run.attempts, 0, settings={}), "the run: settings not"),
        (lambda run: (run.path.parent / "data.jsonl").write_text("x"), "the run: data not"),
    ],
)
def test_what_was_changed_afterwards_is_named(
    run: RunDir, tamper: Callable[[RunDir], object], said: str
) -> None:
    before = problems(run)[1]
    tamper(run)
    found, last = problems(run)
    assert any(line.startswith(said) for line in found), found
    # Whoever writes the certificate again has another last hash.
    assert last == before
    certify(run)
    assert problems(run)[1] != before


def test_a_certificate_that_was_edited_does_not_chain(run: RunDir) -> None:
    path = run.path / "certificate.jsonl"
    good = path.read_text()
    edited(path, 2, metrics="0" * 64)
    assert any("line 3: it does not follow" in line for line in problems(run)[0])
    path.write_text(good)
    without(path, 2)
    found, _ = problems(run)
    assert any("line 3: it does not follow" in line for line in found), found
    assert any(line.startswith("step 1: samples") for line in found), found


def test_a_run_without_a_certificate_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ReplayError, match="--certificate"):
        problems(RunDir(tmp_path))
    assert main(["verify", str(tmp_path), "--steps", "1,2"]) == 1
    assert "--certificate" in capsys.readouterr().err


def test_packages_of_other_versions_are_named(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(other_versions(run))
    monkeypatch.setattr(
        "slime.plugins.tools.replay.certificate.version_of_all", lambda: {"torch": "0.1"}
    )
    found = list(other_versions(run))
    assert any("torch" in line and "0.1" in line for line in found)
    assert any("numpy" in line and "not installed" in line for line in found)


def test_what_only_this_process_sees_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = version_of_all()
    carried = tmp_path / "carried_along-1.0.dist-info"
    carried.mkdir()
    (carried / "METADATA").write_text("Metadata-Version: 2.1\nName: carried_along\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert version_of_all() == before
    assert "torch" in before
