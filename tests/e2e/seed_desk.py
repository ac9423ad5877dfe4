"""A folder and a shell in which the commands of the original specification (seed_commands.yaml) are
typed.

``--override FILE`` at the end scales model and sizes to this machine; ``/path/to/...`` is a folder
of the test. Where the specification leaves something to the user (a helper, a data row, a path),
the test supplies it. What each test adds to the commands is listed in README.md beside this file.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHECKOUT = Path(__file__).resolve().parents[2]
TYPED: dict[str, dict[str, str]] = yaml.safe_load(
    Path(__file__).with_name("seed_commands.yaml").read_text()
)
SCALE = {
    "actor_num_nodes": 1,
    "actor_num_gpus_per_node": 1,
    "rollout_num_gpus": 1,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "global_batch_size": 8,
    "num_rollout": 2,
    "rollout_max_response_len": 8,
    "inline": True,
}


def words(fragment: str) -> list[str]:
    """The flags of a snippet, without its comments."""
    return shlex.split(TYPED[fragment]["fragment"].replace("\\\n", " "), comments=True)


@dataclass
class Desk:
    """A user's folder: the checkout's files by their names, ``path/to`` for ``/path/to``, and a
    shell.
    """

    root: Path
    runner: Any
    model: Path

    def write(self, name: str, text: str) -> Path:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return file

    def python(self, name: str, before: str, *entries: str, after: str = "") -> None:
        """A module of the user's: the specification's code, with what it leaves to the user around
        it.
        """
        self.write(
            name, "\n\n".join([before, *(TYPED[entry]["python"] for entry in entries), after])
        )

    def rows(self, name: str, *entries: str) -> None:
        rows: list[Any] = []
        for entry in entries:
            text = TYPED[entry]["data"]
            rows += (
                [json.loads(text)] if text.startswith("{\n") else map(json.loads, text.splitlines())
            )
        self.write(f"path/to/{name}", "".join(json.dumps(row) + "\n" for row in rows))

    def local(self, text: str) -> str:
        """Place the specification's absolute paths below this folder, and join the lines that it
        lost.
        """
        text = text.replace("\\ ", " ")
        return text.replace("/path/to/", f"{self.root}/path/to/").replace(
            "/your/", f"{self.root}/your/"
        )

    def command(self, entry: str, *fragments: str, **scale: object) -> str:
        """An entry with snippets behind it, scaled by the override file."""
        values = SCALE | {"hf_checkpoint": str(self.model)} | scale
        override = self.write(
            "laptop.yaml", yaml.safe_dump({k: v for k, v in values.items() if v != "as typed"})
        )
        flags = [word for fragment in fragments for word in words(fragment)]
        text = TYPED[entry]["text"] if entry in TYPED else entry
        return f"{self.local(text.rstrip())} {self.local(shlex.join(flags))} --override {override}"

    def start(self, text: str, **env: str) -> Any:
        """Type ``text`` into bash, in an environment whose commands are those beside this
        Python.
        """
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return self.runner.spawn(["bash", "-ec", text], {"PATH": path, **env})

    def type(self, text: str, timeout: float = 300, **env: str) -> Any:
        result = self.runner.finish(self.start(text, **env), "latest", timeout)
        assert result.code == 0, f"{text}\n{result.output}"
        return result

    def run_here(self, text: str) -> Any:
        """Let bash read ``text``, and do in this process what it would have Python do."""
        typed = self.root / "typed"
        self.write("typed/python", f"#!/bin/sh\nprintf '%s\\0' \"$@\" >{typed}/words\n").chmod(
            0o755
        )
        path = os.pathsep.join([str(typed), str(Path(sys.executable).parent), os.environ["PATH"]])
        done = self.runner.finish(self.start(text, PATH=path), "latest")
        assert done.code == 0, f"{text}\n{done.output}"
        script, *argv = (typed / "words").read_text().rstrip("\0").split("\0")
        places, modules = list(sys.path), set(sys.modules)
        try:
            result = self.runner.here(argv, "latest", script)
        finally:  # the next test has modules of the same names
            sys.path[:] = places
            for name in sys.modules.keys() - modules:
                if (getattr(sys.modules[name], "__file__", None) or "").startswith(f"{self.root}/"):
                    del sys.modules[name]
        assert result.code == 0, f"{text}\n{result.output}"
        return result

    def train(
        self, entry: str, *fragments: str, before: str = "", here: bool = True, **scale: object
    ) -> Any:
        """Type a command that trains, and see it end. One that is inline runs in the process of the
        test.

        Args:
            here: False for a script that finds Python by itself.
        """
        text = f"{before}\n{self.command(entry, *fragments, **scale)}"
        result = self.run_here(text) if here and scale.get("inline", True) else self.type(text)
        assert len(result.metrics()) == 2, result.output
        assert self.runner.wait_gone() == []
        return result


def lay_out(runner: Any, model: Path, folder: Path) -> Desk:
    """A desk in ``folder`` with the data files that the specification names."""
    for name in ("train.py", "train_async.py", "tools", "scripts", "examples", "requirements.txt"):
        (folder / name).symlink_to(CHECKOUT / name)
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "Qwen3-4B").symlink_to(model)
    made = Desk(folder, runner, model)
    made.rows("data.jsonl", "text_rows")
    made.rows("train.jsonl", "text_rows", "chat_row")
    made.rows("agent_data.jsonl", "chat_row")
    for name in ("aime", "gsm8k"):
        made.rows(f"{name}.jsonl", "text_rows")
    return made
