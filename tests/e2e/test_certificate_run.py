"""``--certificate`` and ``slime verify RUN --steps`` on a real run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]


def test_steps_are_computed_again_and_a_tampered_row_is_found(runner, flags) -> None:
    ran = runner.inline(
        *flags, "--certificate", "--save", "saved", "--save-interval", 1,
        "--dump-details", "details",
    )  # fmt: skip
    assert ran.code == 0, ran.output

    # A process of its own has imported other packages than the one that wrote the certificate.
    words = ["verify", str(ran.folder), "--steps", "0,2"]
    process = runner.spawn([sys.executable, "-m", "slime.cli.main", *words])
    result = runner.finish(process, "run")
    code, said = result.code, result.output
    assert code == 0 and "certificate: holds; its last hash is" in said, said
    assert "step 0: equal, bit for bit" in said and "step 2: equal, bit for bit" in said, said
    assert "package" not in said, said
    metrics = Path(ran.folder) / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    next(row for row in rows if row.get("rollout/step") == 0)["train/loss"] = 0.25
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = runner.command(*words)
    code, said = result.code, result.output
    assert code == 1 and "step 0: metrics not what the certificate says" in said, said
    assert "step 0: DIFFERS, first in train/loss" in said, said


def test_a_certificate_needs_the_samples(runner, flags) -> None:
    ran = runner.inline(*flags, "--certificate")
    assert ran.code != 0 and "--save-debug-rollout-data" in ran.output
    assert not (Path(ran.folder) / "certificate.jsonl").exists()
