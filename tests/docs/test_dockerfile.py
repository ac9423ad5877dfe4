"""The Dockerfile cannot be built by a test; what it names exists, and it asks nobody but the
package registries.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
TEXT = (CHECKOUT / "Dockerfile").read_text(encoding="utf-8")
CODE = re.sub(
    r"\\\n", " ", "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))
)


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.+)$", CODE, re.MULTILINE)


def test_what_it_names_exists() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'pip install -e "\.\[([\w,-]+)\]"', CODE)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (version,) = re.findall(r"^FROM python:(\d+\.\d+)-", CODE, re.MULTILINE)
    assert f">={version}" in project["requires-python"]
    scripts = {
        word for line in instructions("RUN") for word in re.findall(r"python (\S+\.py)", line)
    }
    assert scripts == {"train.py"} and all((CHECKOUT / script).is_file() for script in scripts)
    ignored = (CHECKOUT / ".dockerignore").read_text().split()
    assert instructions("COPY") == [". ."] and not {"slime", "scripts", "pyproject.toml"} & set(
        ignored
    )
    kept = subprocess.run(
        ["git", "ls-files", *ignored], cwd=CHECKOUT, capture_output=True, text=True, timeout=30
    )
    assert kept.stdout == "", "what the image leaves out is no part of the checkout"


def test_it_installs_from_registries_alone_and_cleans_up() -> None:
    assert not re.search(r"https?://|git clone|git\+|curl|wget", CODE)
    for line in instructions("RUN"):
        if "apt-get install" in line:
            assert "apt-get update" in line and line.rstrip().endswith(
                "rm -rf /var/lib/apt/lists/*"
            )


def test_the_guide_runs_it_as_its_head_says() -> None:
    guide = (CHECKOUT / "docs/en/get_started/quick_start.md").read_text(encoding="utf-8")
    for command in re.findall(r"^#   (docker .+)$", TEXT, re.MULTILINE):
        assert command.split(" --ulimit")[0] in guide
