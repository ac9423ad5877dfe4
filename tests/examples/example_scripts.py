"""Run an example's scripts dry (``DRY_RUN=1``) and parse the training commands that they would
start.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pretended_machine import pretend_machine

from slime.config.args import Args
from slime.config.machine import Machine
from slime.config.parser import load_args

CHECKOUT = Path(__file__).resolve().parents[2]
EXAMPLES = CHECKOUT / "examples"
LAPTOP = Machine(gpus=0, cores=2, in_cluster=False)
CLUSTER = Machine(gpus=8, cores=64, in_cluster=True)  # as large as a script says


@dataclass
class Command:
    """One training run of a script."""

    name: str
    script: str
    flags: list[str]


def load_example(file: str) -> ModuleType:
    """A Python file below ``examples/`` as a module."""
    path = EXAMPLES / file
    name = f"example_{path.parent.name.replace('-', '_')}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def small_model(folder: Path, **more: Any) -> Path:
    """What the checks and ``slime fetch-model`` look at; never loaded. ``more`` goes to its
    config.json.
    """
    folder.mkdir(exist_ok=True)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        **more,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_text("")
    return folder


def small_datasets(folder: Path) -> Path:
    """The shared data sets' files with two rows each, in their own columns."""
    if folder.is_dir():
        return folder
    import pyarrow as pa
    import pyarrow.parquet as pq

    asked = {
        "question": "How many legs have two cats?",
        "answer": "2 cats x 4 = <<2*4=8>>8\n#### 8",
    }
    solved = {"problem": "What is $2^3$?", "solution": "It is $\\boxed{8}$.", "answer": "8"}
    rows = {
        "gsm8k/train.jsonl": asked,
        "gsm8k/test.jsonl": asked,
        "math500/math500.jsonl": solved,
        "aime/aime24.jsonl": solved | {"id": 1},
        "aime/AIME25_retool.jsonl": {"input": "What is 2^3?", "output": "8"},
    }
    for name, row in rows.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{json.dumps(row)}\n" * 2)
    (folder / "hotpotqa").mkdir()
    question = {
        "question": "Which is larger, a cat or a whale?",
        "answer": "a whale",
        "type": "comparison",
    }
    (folder / "hotpotqa" / "hotpot_dev_v1_simplified.json").write_text(json.dumps([question] * 2))
    (folder / "dapo").mkdir()
    prompt = [{"role": "user", "content": "What is $2^3$?"}]
    dapo = {
        "data_source": "math",
        "prompt": prompt,
        "ability": "MATH",
        "reward_model": {"ground_truth": "8"},
    }
    pq.write_table(pa.Table.from_pylist([dapo] * 2), folder / "dapo" / "dapo_math_17k.parquet")
    return folder


def settings_of(script: Path, work: Path, datasets: bool = True) -> dict[str, str]:
    """The variables that a script reads. ``$MODEL`` is set for the CPU scripts alone: those for a
    GPU node have a hub id for a default. ``$DATA`` is a file of math problems with prompt and
    label."""
    data = work / "data.jsonl"
    data.write_text(
        json.dumps({"prompt": [{"role": "user", "content": "What is 2 + 2?"}], "label": "4"}) + "\n"
    )
    settings = {"OUTPUT_DIR": str(work / "outputs"), "DATA": str(data)}
    if script.name == "run_cpu.sh":
        vision = "vlm" in script.parent.name
        model = (
            small_model(work / "vision", image_token_id=5)
            if vision
            else small_model(work / "model")
        )
        settings["MODEL"] = str(model)
    if datasets:
        settings["SLIME_DATASETS"] = str(small_datasets(work / "datasets"))
    return settings


def dry_run(script: Path, work: Path, datasets: bool = True) -> list[Command]:
    """The training commands of a script that starts nothing."""
    keep = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MODEL", "SGLANG", "SLIME_DATASETS")
    }
    own = {"DRY_RUN": "1", "SLIME_PYTHON": sys.executable, **settings_of(script, work, datasets)}
    done = subprocess.run(
        ["bash", str(script)],
        cwd=work,
        env=keep | own,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [
        shlex.split(line) for line in done.stdout.splitlines() if line.startswith("python train")
    ]
    return [
        Command(flags[flags.index("--run-name") + 1], script, flags) for _, script, *flags in lines
    ]


def parse(command: Command, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Args:
    """slime's own parser with all its checks, as if on ``machine`` with every backend installed."""
    pretend_machine(monkeypatch, machine)
    return load_args(command.flags, asynchronous=command.script == "train_async.py")
