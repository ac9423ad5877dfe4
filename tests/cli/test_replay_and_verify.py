"""The words of ``slime replay`` and ``slime verify``, and what they ask for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.cli.main import main
from slime.config.args import Args
from slime.plugins.tools import verify as verify_run
from slime.plugins.tools.commands import replay as replay_command
from slime.plugins.tools.commands import verify as verify_command
from slime.plugins.tools.replay import ReplayError, step
from slime.plugins.tools.replay.step import Wanted
from slime.plugins.tools.verify import Verified
from slime.plugins.tools.verify.check import Check
from slime.plugins.tools.verify.small import SmallModel


def asked_of_verify(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[Any, bool]:
    asked: list[tuple[Any, bool]] = []

    def verify_model(target: Any, as_json: bool) -> int:
        asked.append((target, as_json))
        return 0

    monkeypatch.setattr(verify_command, "verify_model", verify_model)
    assert main(["verify", "models/mine", *words]) == 0
    return asked[0]


@pytest.mark.parametrize(
    ("words", "sizes", "ranks"),
    [
        ([], {}, 1),
        (["--dp", "2"], {}, 2),
        (["--tp", "2", "--sp"], {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2),
        (
            ["--tp", "2", "--etp", "1"],
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
            2,
        ),
        (
            ["--pp", "2", "--vpp", "3"],
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3},
            2,
        ),
        (["--cp", "2", "--dp", "2"], {"context_parallel_size": 2}, 4),
        (
            ["--ep", "2", "--etp", "2", "--tp", "4"],
            {
                "expert_model_parallel_size": 2,
                "expert_tensor_parallel_size": 2,
                "tensor_model_parallel_size": 4,
            },
            4,
        ),
    ],
    ids=["one rank", "dp", "tp and sp", "etp of one", "pp and vpp", "cp and dp", "ep and etp"],
)
def test_layouts(
    monkeypatch: pytest.MonkeyPatch, words: list[str], sizes: dict[str, Any], ranks: int
) -> None:
    target, as_json = asked_of_verify(monkeypatch, *words)
    assert (target.model, target.backend, target.engine, target.layers) == (
        "models/mine",
        "fsdp",
        "embedded",
        4,
    )
    assert (target.sizes, target.world_size, as_json) == (sizes, ranks, False)


def test_json_of_an_infinite_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [Check("log-probs", False, math.inf, 1e-4), Check("weights", True, 0.5, 1.0)]
    result = Verified(SmallModel(Path("small"), 2, "2 layers"), 1, checks)
    monkeypatch.setattr(verify_run, "verify", lambda target: result)
    target: Any = None
    assert verify_command.verify_model(target, as_json=True) == 1
    printed = capsys.readouterr().out
    facts = json.loads(printed, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [check["largest"] for check in facts["checks"]] == [None, 0.5]


def test_other_options_of_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_of_verify(monkeypatch, "--attn-implementation", "sdpa")[0].flags == {
        "attn_implementation": "sdpa"
    }
    words = [
        "--backend",
        "megatron",
        "--engine",
        "none",
        "--layers",
        "6",
        "--trust-remote-code",
        "--json",
    ]
    target, as_json = asked_of_verify(monkeypatch, *words)
    assert target.flags == {}
    assert (target.backend, target.engine, target.layers, target.trust_remote_code) == (
        "megatron",
        None,
        6,
        True,
    )
    assert as_json


def test_options_of_replay_and_flags_of_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[object] = []

    def read_run(*words: object) -> SimpleNamespace:
        asked.append(words)
        return SimpleNamespace(unrecorded=())

    def replay_step(run: object, wanted: Wanted) -> None:
        asked.append(wanted)
        raise ReplayError("this is enough")

    monkeypatch.setattr("slime.plugins.tools.replay.read_run", read_run)
    monkeypatch.setattr(step, "replay_step", replay_step)
    monkeypatch.chdir(tmp_path)
    assert main(["replay", "outputs/mine", "--step", "3", "--context-parallel-size", "2"]) == 1
    words = [
        "--step",
        "4",
        "--through",
        "--sample",
        "7",
        "--tensors",
        "t",
        "--tolerance",
        "0.5",
        "--json",
    ]
    words += ["--run-its-code"]
    assert main(["replay", "outputs/mine", *words]) == 1
    folder = tmp_path / "outputs" / "mine"
    assert asked == [
        (folder, 3, ["--context-parallel-size", "2"], None),
        Wanted(3),
        (folder, 4, [], replay_command.tell_code),
        Wanted(4, True, 7, tmp_path / "t", 0.5),
    ]


def test_a_folder_without_a_run_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tmp_path), "--step", "0"]) == 1
    assert "config.yaml" in capsys.readouterr().err


def test_a_damaged_checkpoint_leaves_out_the_texts_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    run: Any = SimpleNamespace(args=Args().with_values(hf_checkpoint=str(tmp_path)))
    assert replay_command.texts(run, [1, 2]) == []


def test_a_folder_of_tensors_that_cannot_be_written_is_told_before_the_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "slime.plugins.tools.replay.read_run", lambda *_: SimpleNamespace(unrecorded=())
    )
    monkeypatch.setattr(step, "replay_step", lambda *_: pytest.fail("it trains"))
    file = tmp_path / "file"
    file.touch()
    assert main(["replay", str(tmp_path), "--step", "0", "--tensors", str(file)]) == 1
    assert f"cannot write --tensors {file}: File exists" in capsys.readouterr().err
