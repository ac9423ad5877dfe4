"""How the original specification installs slime and looks around."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from seed_desk import CHECKOUT, TYPED


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.seeds
def test_pip_installs_as_typed(tmp_path: Path) -> None:
    """All three commands, in an environment that sees the packages of this one; nothing may be
    downloaded.
    """
    checkout, env = tmp_path / "slime", tmp_path / "env"
    shutil.copytree(
        CHECKOUT / "slime", checkout / "slime", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "requirements.txt", "train.py"):
        shutil.copy(CHECKOUT / name, checkout / name)
    subprocess.run([sys.executable, "-m", "venv", str(env)], check=True, timeout=120)
    (site,) = env.glob("lib/python3*/site-packages")
    for own in [*site.glob("setuptools*"), *site.glob("_distutils_hack")]:  # too old to build slime
        shutil.rmtree(own)
    (site / "these.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PIP_", "PYTHONPATH"))
    }
    environment |= {"PATH": f"{env / 'bin'}{os.pathsep}{os.environ['PATH']}", "PIP_NO_INDEX": "1"}
    # 0: it is a negative
    environment |= {"PIP_NO_BUILD_ISOLATION": "0", "PIP_CONFIG_FILE": os.devnull}
    text = TYPED["install_in_container"]["text"] + TYPED["install_from_source"]["text"]
    text += "cd /\npython -c 'import slime; print(slime.__file__)'\nslime --help\n"
    done = subprocess.run(
        ["bash", "-ec", text],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(checkout / "slime" / "__init__.py") in done.stdout and "fetch-model" in done.stdout


@pytest.mark.real
def test_the_hub_client_knows_the_command() -> None:
    """No hub is asked: the command of huggingface_hub takes the words as they are typed."""
    command = [str(Path(sys.executable).with_name("hf")), "download", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    for line in TYPED["download"]["text"].splitlines():
        assert line.startswith("hf download ")
        assert all(flag in said for flag in re.findall(r"--[a-z-]+", line))


def test_the_model_scripts_are_listed() -> None:
    listed = subprocess.run(
        ["bash", "-c", TYPED["list_models"]["text"]],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=30,
    ).stdout.split()
    assert {
        "glm4-9B.sh",
        "qwen3-4B.sh",
        "qwen3-30B-A3B.sh",
        "deepseek-v3.sh",
        "llama3-8B.sh",
    } <= set(listed)
    assert {
        "llama3-70B.sh",
        "qwen3-8B.sh",
        "glm4.5-355B-A32B.sh",
        "kimi-k2.sh",
        "moonlight.sh",
    } <= set(listed)


def test_pre_commit_runs_what_ci_runs() -> None:
    config = yaml.safe_load((CHECKOUT / ".pre-commit-config.yaml").read_text())
    entries = [hook["entry"] for repository in config["repos"] for hook in repository["hooks"]]
    ci = (CHECKOUT / ".ci" / "run").read_text()
    for entry in entries:
        assert entry.startswith("python -m ") and f'"$python" {entry.removeprefix("python ")}' in ci
        module = entry.split()[2]
        subprocess.run(
            [sys.executable, "-m", module, "--version"], check=True, timeout=60, capture_output=True
        )


def test_the_search_examples_logic_is_where_the_guide_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from slime.config.hooks import load_function

    monkeypatch.delitem(sys.modules, "generate_with_search", raising=False)  # of another test

    file = CHECKOUT / "examples" / "search-r1" / "search_r1_logic.py"
    generate, reward = (load_function(f"{file}:{name}") for name in ("generate", "exact_match"))
    assert generate.__module__ == reward.__module__ == "generate_with_search"
