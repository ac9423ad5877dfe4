"""What the Dockerfile names exists, and it asks nobody but the package registries. It is built by
scripts/build_image.sh.
"""

from __future__ import annotations

import re
import shutil
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
    for_cuda, for_cpu = re.findall(r'pip install .*?-e "\.\[([\w,-]+)\]"', CODE)
    assert set(f"{for_cuda},{for_cpu}".split(",")) <= set(project["optional-dependencies"])
    assert set(for_cuda.split(",")) - set(for_cpu.split(",")) == {"megatron", "sglang"}
    (version,) = re.findall(r"^FROM python:(\d+\.\d+)-", CODE, re.MULTILINE)
    assert f">={version}" in project["requires-python"]
    assert re.findall(r"env_setup\.(\w+)\(", CODE) == ["install_cpu_torch"]
    assert "def install_cpu_torch(" in (CHECKOUT / "scripts" / "env_setup.py").read_text()
    pins = re.findall("(?m)^[a-z0-9.-]*==[^ ]*", (CHECKOUT / "requirements/cpu.txt").read_text())
    assert len(pins) > 100 and "'^[a-z0-9.-]*==[^ ]*' requirements/cpu.txt" in CODE
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
            assert "apt-get update" in line and "&& rm -rf /var/lib/apt/lists/*" in line


def test_the_guide_runs_it_as_its_head_says() -> None:
    guide = (CHECKOUT / "docs/en/get_started/quick_start.md").read_text(encoding="utf-8")
    for command in re.findall(r"^#   (docker .+)$", TEXT, re.MULTILINE):
        assert command.split(" --ulimit")[0] in guide


def test_the_script_that_builds_it_says_what_is_missing_and_names_no_host(tmp_path: Path) -> None:
    script = CHECKOUT / "scripts" / "build_image.sh"
    text = script.read_text(encoding="utf-8")
    assert not re.search(r"https?://|debian\.org|pypi|/root|/opt|/work", text)
    for program in ("bash", "df", "dirname", "id", "sed", "tail"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    for words, status, told in (
        (["cpu"], 77, "buildah (apt-get install buildah), debootstrap"),
        (["rocm"], 2, "rocm: give cpu, cuda or --keep"),
    ):
        done = subprocess.run(
            [tmp_path / "bash", script, *words],
            env={"PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == status and told in done.stdout + done.stderr
