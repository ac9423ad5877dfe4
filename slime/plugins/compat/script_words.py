"""Read the command of a launch script (bash) without running it: arrays, variables, and the files
that it sources.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime.cli.command import CommandError

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
_REFERENCE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?[-=]([^}]*))?\}|\$(\w+)")
_MODELS = Path(__file__).resolve().parents[3] / "scripts" / "models"
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
        near = [path.parent / name, path.parent / "models" / name, _MODELS / name]
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
        whole = _REFERENCE.fullmatch(word)
        name = (whole[1] or whole[3]) if whole else ""
        if name in names:
            found += names[name]
        else:
            found.append(_REFERENCE.sub(lambda match: _value(match, names), word))
    return found


def _value(match: re.Match[str], names: Mapping[str, list[str]]) -> str:
    known = names.get(match[1] or match[3])
    if known is not None:
        return " ".join(known)
    return match[2] if match[2] is not None else match[0]
