"""The command of a launch script (bash): read without running it (arrays, variables, and the files that
it sources), or recorded by running it where it can do no harm.

bash then runs in the agents' sandbox: without network, with the script's folders read-only, time-bounded,
and as a user without rights also if the caller is root. What would train, install or change
something is replaced by recorders, which come first on PATH and succeed. So loops, arrays, sourced
files, here-documents and ``case`` mean what bash says they mean.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime.cli.command import CommandError
from slime.plugins.agents.sandbox import Limits, Sandbox, SandboxUnavailable
from slime.plugins.compat.helpers import MODELS

PROGRAMS = {
    "slime": re.compile(r"(^|/)train(_async)?\.py$"),
    "verl": re.compile(r"^(verl|recipe)\.([\w.]*\.)?main_\w+$|(^|/)main_(ppo|dapo)\.py$"),
    "openrlhf": re.compile(r"^openrlhf\.cli\.train_ppo|(^|/)train_ppo_ray\.py$"),
    "trl": re.compile(r"^trl$|(^|/)\w*grpo\w*\.py$"),
    "prime-rl": re.compile(r"^rl$"),
}
"""The word of a command line that names the program of a framework."""
_ARRAY = re.compile(
    r"^[ \t]*(\w+)(\+?)=\((?:([^\n]*)\)[ \t]*(?:#[^\n]*)?$|(.*?)\n[ \t]*\)[ \t]*(?:#[^\n]*)?$)",
    re.MULTILINE | re.DOTALL,
)
_VARIABLE = re.compile(r"^[ \t]*(?:export[ \t]+|local[ \t]+)?(\w+)=([^\s(].*)?$", re.MULTILINE)
_SOURCE = re.compile(r"^[ \t]*(?:source|\.)[ \t]+(.+?)[ \t]*$", re.MULTILINE)
_NAMED = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?[-=]([^}]*))?\}|\$(\w+)")
_END = re.compile(r"[|;&]|\d*>")
"""The beginning of the word after a command: a pipe, another command, or where its output goes."""
_DEEPEST = 4  # files that source each other


def command_of(words: list[str]) -> tuple[str, list[str], list[str]]:
    """Return the framework of a command, the words of its program and after it, and those before it.

    Raises:
        CommandError: No word names a program that is known.
    """
    for place in range(len(words)):
        if (framework := _program_at(words, place)) is not None:
            return framework, words[place:], words[:place]
    raise CommandError(
        "no command of slime (train.py, train_async.py), verl (verl.trainer.main_ppo), OpenRLHF "
        "(openrlhf.cli.train_ppo_ray), TRL (trl grpo) or prime-rl (rl @ FILE) was found"
    )


def starts_training(words: list[str]) -> bool:
    """Whether a command names a known program, with a flag after it."""
    return any(_program_at(words, place) for place in range(len(words) - 1))


def _program_at(words: list[str], place: int) -> str | None:
    """Return the framework of which a word is the program."""
    for framework, pattern in PROGRAMS.items():
        # a short word such as rl is a program only if its files or flags follow
        follows = framework != "prime-rl" or " ".join(words[place + 1 :]).startswith(("@", "--"))
        if pattern.search(words[place]) and follows:
            return framework
    return None


def read_script(path: Path) -> list[str]:
    """Return the words of the last command of a script that names a known program, with arrays and
    variables filled in.

    Nothing is run, so a value that only a command can give (``$(...)``) stays as it is.

    Raises:
        CommandError: The file cannot be read, or has no such command.
    """
    names: dict[str, list[str]] = {}
    text = _gather(path, names, _DEEPEST)
    found = None
    for line in re.sub(r"\\\n", " ", text).splitlines():
        words = _words(line.strip(), names)
        if starts_training(words):
            found = words
    if found is None:
        raise CommandError(
            f"{path}: no command of slime, verl, OpenRLHF, TRL or prime-rl was found"
        )
    return _to_the_end(found)


def _to_the_end(words: Sequence[str]) -> list[str]:
    """Leave out what follows where the shell would end a command."""
    kept = []
    for word in words:
        if _END.match(word):
            break
        kept.append(word.removesuffix(";"))
        if word.endswith(";"):
            break
    return kept


def _gather(path: Path, names: dict[str, list[str]], depth: int) -> str:
    """Add the arrays and variables of a script, and of those that it sources, to ``names``; return
    its text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} cannot be read: {error}") from None
    text = re.sub(r"^[ \t]*#.*$", "", text, flags=re.MULTILINE)
    # Files of models come with the script, or are those of this checkout.
    for source in _SOURCE.findall(text):
        name = Path(source.strip("\"'")).name
        near = [path.parent / name, path.parent / "models" / name, MODELS / name]
        file = next((file for file in near if file.is_file() and file != path), None)
        if file is not None and depth:
            _gather(file, names, depth - 1)
    # Variables first: arrays use them.
    outside = _ARRAY.sub("", text)
    for name, value in _VARIABLE.findall(outside):
        if not value.startswith("$("):
            names[name] = _words(value, names)
    for name, more, short, long in _ARRAY.findall(text):
        content = short or long
        lines = "\n".join(
            line for line in content.splitlines() if not line.lstrip().startswith("#")
        )
        names[name] = [
            *(names.get(name, []) if more else []),
            *_words(lines.replace("\\\n", " "), names),
        ]
    return outside


def _words(text: str, names: Mapping[str, list[str]]) -> list[str]:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:  # a quote that is closed on another line
        words = text.split()
    found: list[str] = []
    # An array becomes several words, a variable within a word one.
    for word in words:
        if word in ("$@", "${@}", "$*"):  # the arguments of the script, of which there are none
            continue
        whole = _NAMED.fullmatch(word)
        name = (whole[1] or whole[3]) if whole else ""
        if name in names:
            found += names[name]
        else:
            found.append(_NAMED.sub(lambda match: _value(match, names), word))
    return found


def _value(match: re.Match[str], names: Mapping[str, list[str]]) -> str:
    known = names.get(match[1] or match[3])
    if known is not None:
        return " ".join(known)
    return match[2] if match[2] is not None else match[0]


SECONDS = 30.0
STARTERS = (
    "python", "python3", "ray", "torchrun", "accelerate", "deepspeed", "srun", "sbatch", "mpirun", "docker",
    "podman", "apptainer", "singularity", "uv", "uvx", "ssh", "pdsh", "kubectl", "slime", "trl", "rl", "bash",
    "sh", "slime-python",
)  # fmt: skip
"""Programs whose words are recorded, since they or their words may start a training."""
QUIET = (
    "pip", "pip3", "conda", "mamba", "apt", "apt-get", "git", "hf", "huggingface-cli", "modelscope", "wget",
    "curl", "aws", "gsutil", "rsync", "scp", "wandb", "pkill", "killall", "kill",
    "sleep", "sudo", "rm", "rmdir", "mv", "cp", "ln", "touch", "chmod", "chown", "tmux", "screen",
    "systemctl", "ip", "ifconfig", "nc", "ping", "sync", "tensorboard",
)  # fmt: skip
"""Programs that do nothing and say nothing, so that a script goes on."""
ASKED = ("nvidia-smi", "rocm-smi", "scontrol")
"""Programs that a script asks about its machines, of which there are none here."""
_SYSTEM = ("/bin", "/usr", "/etc/alternatives")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")
_REFERENCE = re.compile(r"\$\{?(\w+)(:?[-=+?])?")
_ASSIGNED = re.compile(
    r"(?:^|[\s;(])(?:for\s+|read\s+(?:-\w+\s+)*)?(\w+)(?:\+?=|\s+in\s)", re.MULTILINE
)
_OWN = (
    "BASH_SOURCE", "HOME", "USER", "PATH", "PWD", "OLDPWD", "RANDOM", "SECONDS", "LINENO", "HOSTNAME", "UID",
    "EUID", "PPID", "IFS", "FUNCNAME",
)  # fmt: skip
"""Variables that bash sets."""


@dataclass
class Recorded:
    """What a script did.

    Attributes:
        commands: The words of each recorded command, in order.
        remarks: What the reader of the translation has to know, one line each.
        failure: Why bash did not reach the end of the script; empty if it did.
    """

    commands: list[list[str]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    failure: str = ""


def record(script: Path, arguments: Sequence[str] = ()) -> Recorded:
    """Run a script and return the commands that it starts.

    Raises:
        SandboxUnavailable: This machine has no namespaces, or no bash.
        CommandError: The script cannot be read.
    """
    try:
        text = script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{script} cannot be read: {error}") from None
    bash = shutil.which("bash")
    if bash is None:
        raise SandboxUnavailable("there is no bash")
    limits = Limits(
        seconds=SECONDS + 10,
        children=True,
        tasks=64,
        output_bytes=8 << 20,
        open_files=256,
        disk_bytes=256 << 20,
    )
    place = script.resolve()
    whole = _with_sources(place, text)
    environment = _environment(whole)
    named = "\n".join([text, *(value for value in environment.values() if ":" not in value)])
    folders = sorted({str(path) for path in _folders(place, named)})
    python = str(Path(sys.executable).resolve())
    system = filter(os.path.exists, (*_SYSTEM, str(MODELS), python))
    sandbox = Sandbox(limits, workers=1, readable=sorted({*folders, *system}))
    order = {
        "bash": bash, "python": python, "script": str(place), "text": text,
        "arguments": list(arguments), "cwd": os.getcwd(),
        "folders": folders, "environment": environment, "starters": STARTERS, "quiet": QUIET, "asked": ASKED,
        "seconds": SECONDS / 2,
        "models": str(MODELS),
    }  # fmt: skip
    program = Path(__file__).with_name("recorder_child.py").read_text(encoding="utf-8")
    code = f"{program}\n\nmain(json.loads({json.dumps(order)!r}))\n"
    result = asyncio.run(sandbox.run(code))
    if not result.ok:
        return Recorded(failure=f"the recording ended with {result.status}: {result.stderr[-300:]}")
    recorded = Recorded(**json.loads(result.stdout))
    recorded.remarks += _unset(whole, environment)
    return recorded


def _folders(script: Path, text: str) -> list[Path]:
    """Return what bash may read: the folder in which this is called, that of the script with the
    checkout around it, and the folders that the script or its variables name.
    """
    top = next((one for one in script.parents if (one / ".git").exists()), script.parent)
    words = re.findall(r"(?<![\w$}.])/[\w.+-]+(?:/[\w.+-]+)+", text)
    named = [path if path.is_dir() else path.parent for path in map(Path, words) if path.exists()]
    # Python's own files may be below a home folder, which as a whole only its owner can read.
    refused = {Path("/"), Path("/home"), Path("/tmp"), Path.home()}
    return [
        path
        for path in (Path.cwd(), top, script.parent, *named)
        if path not in refused and path.parts[1] not in ("proc", "sys", "dev", "run", "etc")
    ]


def _environment(text: str) -> dict[str, str]:
    """Return the variables that the script names. Of a secret it gets only the name, so that the
    printed command has none.
    """
    names = {match[1] for match in _REFERENCE.finditer(text)} & os.environ.keys()
    given = {name: f"${{{name}}}" if _SECRET.search(name) else os.environ[name] for name in names}
    return {
        "HOME": os.environ.get("HOME", "/root"),
        "USER": os.environ.get("USER", "user"),
        **given,
        "SLIME_PYTHON": "slime-python",
    }


def _with_sources(script: Path, text: str) -> str:
    """Return the text of a script and of the files that it sources, as far as they are beside it."""
    names = re.findall(r"(?m)^\s*(?:source|\.)\s.*?([\w.-]+)[\"']?\s*(?:#.*)?$", text)
    files = {
        base / folder / name
        for name in names
        for base in (script.parent, script.parent.parent, Path.cwd())
        for folder in ("", "models", "scripts")
    }
    return "\n".join(
        [text, *(file.read_text(errors="replace") for file in files if file.is_file())]
    )


def _unset(text: str, environment: Mapping[str, str]) -> list[str]:
    """Name the variables that the script reads without a default and that nobody sets."""
    text = re.sub(r"(?m)^\s*#.*$", "", text)
    known = {*environment, *_OWN, *_ASSIGNED.findall(text)}
    known |= set(
        re.findall(
            r"(?:local|declare|export|readonly|mapfile|getopts\s+\S+)\s+(?:-\w+\s+)*(\w+)", text
        )
    )
    known |= {match[1] for match in _REFERENCE.finditer(text) if match[2]}
    names = {match[1] for match in _REFERENCE.finditer(text)} - known
    missing = sorted(
        name for name in names if name.isupper() and not name.isdigit() and name != "MODEL_ARGS"
    )
    return [f"not set where this was called, so empty: {', '.join(missing)}"] if missing else []
