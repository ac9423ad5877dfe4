"""The parts of a GPU call: one that fails or hangs leaves no process and costs no other figure."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_h200", BENCHMARKS / "h200.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def part(h200: ModuleType, code: str, seconds: float = 30.0) -> Any:
    return h200.Part(seconds, lambda options, folder: [sys.executable, "-c", code], h200.show_any)


def test_parts_fail_alone(
    h200: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    hang = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
        "start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    parts = {
        "good": part(h200, "print('noise'); print('{\"ratio\": 0.98}'); print('more')"),
        "bad": part(h200, "raise SystemExit('it broke')"),
        "hangs": part(h200, hang, seconds=2.0),
    }
    monkeypatch.setattr(h200, "PARTS", parts)
    words = [
        "h200.py",
        "--parts",
        "hangs,bad,good",
        "--output",
        str(tmp_path / "out"),
        "--work",
        str(tmp_path / "work"),
    ]
    monkeypatch.setattr(sys, "argv", words)
    started = time.monotonic()
    h200.main()
    assert time.monotonic() - started < 600, "the part that hangs was waited for"
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results["good"]["figures"] == {"ratio": 0.98} and results["good"]["status"] == "exit 0"
    assert results["bad"]["figures"] is None and results["bad"]["status"] == "exit 1"
    assert results["hangs"]["status"].startswith("not done")
    child = int((tmp_path / "work" / "hangs" / "output.log").read_text().splitlines()[-1])
    assert not psutil.pid_exists(child)
    assert "it broke" in next((tmp_path / "out").glob("*.log")).read_text()


def test_parts_of_one_gpu_run_side_by_side(
    h200: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    meets = f"""
import os, pathlib, time
gpu, here = os.environ["CUDA_VISIBLE_DEVICES"], pathlib.Path({str(tmp_path)!r})
(here / f"gpu{{gpu}}").touch()
while not (here / f"gpu{{1 - int(gpu)}}").exists():  # the other part runs meanwhile
    time.sleep(0.05)
print('{{"gpu": ' + gpu + "}}")
"""
    sees = (
        'import os; print(\'{"seen": "\' + os.environ.get("CUDA_VISIBLE_DEVICES", "all") + \'"}\')'
    )
    parts = {"one": part(h200, meets), "all_gpus": part(h200, sees), "two": part(h200, meets)}
    monkeypatch.setattr(h200, "PARTS", parts)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    words = ["--parts", "one,two,all_gpus", "--at-once", "2", "--output", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["h200.py", *words])
    h200.main()
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {results[name]["figures"]["gpu"] for name in ("one", "two")} == {0, 1}
    assert results["all_gpus"]["figures"] == {"seen": "all"} and list(results) == [
        "one",
        "two",
        "all_gpus",
    ]


def test_parts_of_several_gpus_run_beside_others(
    h200: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    meets = f"""
import os, pathlib, time
gpus, here = os.environ["CUDA_VISIBLE_DEVICES"], pathlib.Path({str(tmp_path)!r})
(here / f"seen{{gpus}}").touch()
while len(list(here.glob("seen*"))) < 2:
    time.sleep(0.05)
print('{{"gpus": "' + gpus + '"}}')
"""
    monkeypatch.setattr(h200, "PARTS", {"one": part(h200, meets), "two_gpus": part(h200, meets)})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")  # others use the rest of the machine
    words = ["--parts", "one,two_gpus", "--gpus", "2", "--at-once", "3", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["h200.py", *words])
    h200.main()
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    seen = [results[name]["figures"]["gpus"] for name in ("one", "two_gpus")]
    assert len(seen[1].split(",")) == 2
    assert {*seen[0].split(","), *seen[1].split(",")} == {"3", "5", "6"}


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_release_measures_the_parts_that_the_machine_can_run(
    h200: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    words = ["--release", "--gpus", str(gpus), "--smollm2", "model", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["h200.py", *words])
    options = h200.parse_options()
    several = [name for name in options.parts if name.endswith("_gpus")]
    assert bool(several) == (gpus > 1) and "recipes" in options.parts
    assert options.seconds == 1800


def test_the_table_of_a_release_says_what_was_measured_where(
    h200: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    half_done = 'print(\'{"recipe": "lora"}\'); raise SystemExit(3)'
    parts = {"mfu": part(h200, "print('{\"train_mfu\": 0.5}')"), "recipes": part(h200, half_done)}
    parts["recipes"] = h200.Part(30, parts["recipes"].command, h200.show_recipes)
    monkeypatch.setattr(h200, "PARTS", parts)
    words = ["--release", "--parts", "mfu,recipes", "--smollm2", "model", "--commit", "abc12345"]
    monkeypatch.setattr(sys, "argv", ["h200.py", *words, "--output", str(tmp_path)])
    h200.main()
    assert "lora" in capsys.readouterr().out, "a part that failed has a line of the table"
    [path] = tmp_path.glob("h200_release_*.json")
    table = json.loads(path.read_text())
    assert table["commit"] == "abc12345" and table["date"] in path.name and table["card"]
    assert table["parts"]["mfu"]["figures"] == {"train_mfu": 0.5}
    assert table["parts"]["recipes"]["status"] == "exit 3"


NAMES = [
    *(
        "mfu",
        "mfu_gpus",
        "mfu_experts_gpus",
        "mfu_delta_nets",
        "mfu_megatron_gpus",
        "rollout",
        "colocate",
        "step",
    ),
    *("curve", "start", "adapter", "adapter_32b", "step_delta_nets"),
]


@pytest.mark.parametrize("name", NAMES)
def test_commands_name_scripts_that_are_there(h200: ModuleType, tmp_path: Path, name: str) -> None:
    options = argparse.Namespace(device="cpu", gpus=2, gsm8k=None, smollm2=tmp_path)
    words = [str(word) for word in h200.PARTS[name].command(options, tmp_path)]
    scripts = [word for word in words if word.endswith(".py")]
    assert scripts and all(Path(script).is_file() for script in scripts)
    assert "--tiny" in words
