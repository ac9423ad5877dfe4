"""The warning of a run that will not fit on the GPUs of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_shapes import DENSE, EXPERTS, read

from slime.plugins.tools.plan import read as warn
from slime.plugins.tools.plan.setups import KINDS


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", None),
    ],
)
def test_the_drivers_name_says_the_kind(tmp_path: Path, name: str, kind: str | None) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text(f"Model: \t\t {name}\nIRQ: 1\n")
    found = warn.installed_kind(tmp_path)
    assert (found.name if found else None) == kind
    assert warn.installed_kind(tmp_path / "none") is None


def test_a_run_is_warned_of_only_if_it_will_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.config.machine import Machine
    from slime.config.parser import read_command_line
    from slime.config.resolve import resolve_defaults
    from slime.config.rules import Run

    def started(config: dict[str, object], kind: str | None, engine: str = "sglang") -> str:
        read(tmp_path, config)
        words = [
            "--hf-checkpoint",
            str(tmp_path),
            "--train-backend",
            "fsdp",
            "--colocate",
            "--rm-type",
            "random",
        ]
        words += ["--rollout-backend", engine]
        args, problems = read_command_line(
            [*words, "--actor-num-gpus-per-node", "1", "--num-rollout", "1"]
        )
        assert not problems + resolve_defaults(Run(args, machine=Machine(1, 16, False)))
        monkeypatch.setattr(warn, "installed_kind", lambda: KINDS[kind] if kind else None)
        return "\n".join(warn.misfits(args))

    assert started(DENSE, "h200") == ""
    assert "GiB of 39.4 on each GPU" in started(DENSE, "a100-40gb")
    assert "more GPUs" in started(EXPERTS | {"num_hidden_layers": 47}, "h200")
    assert started(DENSE, None) == ""
    assert started(DENSE, "a100-40gb", "embedded") == "", "it sizes its cache by what is free"
