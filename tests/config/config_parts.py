"""A folder with the smallest checkpoint and data that the checks look at."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime.config.args import Args
from slime.config.machine import Machine
from slime.config.parser import ConfigError, check_args, load_args

CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
}


@dataclass
class Workplace:
    """Paths that a command line can name, and a machine to run it on."""

    root: Path
    use: Callable[[Machine], None]

    @property
    def model(self) -> str:
        return str(self.root / "model")

    @property
    def data(self) -> str:
        return str(self.root / "data.jsonl")

    @property
    def required(self) -> list[str]:
        return ["--hf-checkpoint", self.model, "--prompt-data", self.data]

    def write(self, name: str, text: str) -> str:
        file = self.root / name
        file.write_text(text)
        return str(file)

    def load(self, line: str = "", *, asynchronous: bool = False) -> Args:
        return load_args([*self.required, *line.split()], asynchronous=asynchronous)

    def load_unchecked(self, words: list[str]) -> Args:
        """Resolved arguments, whatever is wrong with them."""
        return check_args([*self.required, *words])[0]

    def problems(self, line: str = "", *, asynchronous: bool = False) -> list[str]:
        """What is wrong with the line; empty when nothing is."""
        try:
            self.load(line, asynchronous=asynchronous)
        except ConfigError as error:
            return error.problems
        return []


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """A machine of two cores and no GPU; ``use`` puts another in its place."""

    def use(machine: Machine) -> None:
        monkeypatch.setattr("slime.config.rules.this_machine", lambda: machine)

    use(Machine(gpus=0, cores=2, in_cluster=False))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    rows = [
        {"prompt": "What is 2 + 2?", "label": "4"},
        {"prompt": "Solve: 3x = 12", "label": "x = 4"},
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return Workplace(tmp_path, use)
