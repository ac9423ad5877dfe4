"""``slime translate <script or command>``: the command of slime for a launch script of slime 0.3,
verl, OpenRLHF, TRL or prime-rl, and what changes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from slime.cli.command import CommandError
from slime.config.args import FLAGS
from slime.config.files import load_yaml
from slime.config.parser import read_command_line
from slime.config.settings import why_missing
from slime.plugins.agents.sandbox import SandboxUnavailable
from slime.plugins.compat.frameworks import (
    Translation,
    add_trl_sizes,
    of_other,
    pairs_of,
    tables,
)
from slime.plugins.compat.older import ORIGINAL_DEFAULTS
from slime.plugins.compat.recorder import Recorded, command_of, read_script, record, starts_training
from slime.plugins.megatron.flags import PERFORMANCE

_GPUS = re.compile(r"--(?:nproc[_-]per[_-]node|num[_-]processes|num[_-]gpus)")
"""The flags of launchers that count the processes of a machine."""
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", "")


def translate(words: Sequence[str], say: Callable[[str], None] = print) -> int:
    """Print the command of slime and what changes, for each training that a script starts.

    Args:
        words: The path of a script and its arguments, or the words of a command.
        say: Called with each line.

    Raises:
        CommandError: There is no script and no known command.
    """
    words = [word for word in words if word != "--"]
    if not words:
        raise CommandError("give a launch script, or a command after --")
    first = Path(words[0])
    if first.suffix in _SCRIPTS and (first.is_file() or len(words) == 1):
        commands, remarks, guessed = _started_by(first, words[1:])
    else:
        commands = [list(words)]
        remarks = []
        guessed = False
    for number, command in enumerate(commands):
        if number:
            say("")
        made = _translated(command)
        made.guessed = guessed
        changes = [*remarks, *made.changes]
        say(made.command())
        say("")
        say("What changes:" if changes else "Nothing changes.")
        for change in changes:
            say(f"  {change}")
    return 0


def _started_by(script: Path, arguments: Sequence[str]) -> tuple[list[list[str]], list[str], bool]:
    """Return the trainings that a script starts, what has to be known about them, and whether they
    are a guess.

    Where bash cannot be run apart from everything else, or starts no training, the text is read.
    """
    try:
        recorded = record(script, arguments)
    except SandboxUnavailable as error:
        recorded = Recorded(failure=f"it could not be run apart from everything else: {error}")
    found: list[list[str]] = []
    for command in recorded.commands:
        if starts_training(command) and command not in found:
            found.append(command)
    remarks = list(recorded.remarks)
    guessed = not found
    if guessed:
        found.append(read_script(script))
        why = recorded.failure or "bash reached its end without starting a training"
        remarks = [f"the script was read and not run, so this is a guess: {why}"]
    elif recorded.failure:
        remarks.append(f"the script did not reach its end: {recorded.failure}")
    if len(found) > 1:
        remarks.append(f"the script starts {len(found)} trainings, which are all printed")
    return found, remarks, guessed


def _translated(words: list[str]) -> Translation:
    framework, command, before = command_of(words)
    if framework == "slime":
        return _of_slime(command)
    if framework == "prime-rl":
        command = ["rl", *_with_files(command[1:])]
    if framework == "trl":
        command = [command[0], *_with_yaml(command[1:])]
    made = of_other(tables()[framework], command)
    if framework == "prime-rl":  # it generates with vLLM, beside the training
        made.program = "train_async.py"
        made.add(["--rollout-backend", "vllm"])
    _launched(made, before)
    if framework == "trl":
        add_trl_sizes(made, command[1:])
    # What train.py would refuse has to be mended first.
    made.changes += [
        f"train.py refuses this: {problem}"
        for problem in read_command_line([word for flag in made.flags for word in flag])[1]
    ]
    made.changes += tables()[framework].get("notes", [])
    return made


def _launched(made: Translation, before: Sequence[str]) -> None:
    """Take over the number of GPUs from a launcher, and name its other flags."""
    if "ray" in before:  # its flags concern the cluster and not the training
        return
    rest = []
    for option, values in pairs_of(before):
        if _GPUS.fullmatch(option) and values and values[0].isdigit():
            made.add(["--actor-num-gpus-per-node", values[0]])
        elif option:
            rest.append(" ".join([option, *values[:1]]))
    if rest:
        made.changes.append(
            f"{', '.join(rest)}: of the launcher, which slime does not need: it starts its "
            "processes itself"
        )


def _of_slime(command: Sequence[str]) -> Translation:
    """Keep all flags that exist, and name those that do not, that have no effect, and the defaults
    that differ.
    """
    made = Translation(Path(command[0]).name)
    given = set()
    for option, values in pairs_of(command[1:]):
        if not option:
            made.changes.append(f"{' '.join(values)}: belongs to no flag; it is left out")
            continue
        name = option[2:].replace("-", "_")
        given.add(name)
        # A flag may be gone, refused, or without effect.
        reason = why_missing(option)
        if reason or any(
            f"{option}: no such flag" in problem
            for problem in read_command_line([option, *values])[1]
        ):
            made.changes.append(f"{option} {reason or 'does not exist'}; it is left out")
            continue
        flag = FLAGS.get(name)
        if flag is not None and flag.status == "refused":
            made.changes.append(f"{option} is not supported: {flag.reason}; it is left out")
            continue
        if flag is not None and flag.status == "notice":
            made.changes.append(f"{option} has no effect: {flag.reason}")
        elif name in PERFORMANCE:
            made.changes.append(f"{option} has no effect: {PERFORMANCE[name]}")
        made.flags.append([option, *values])
    if any(name.startswith("vllm_") for name in given):  # as in a fork whose engine is vLLM
        made.add(["--rollout-backend", "vllm"])
    # A flag that is not given has another default here.
    for name, value in ORIGINAL_DEFAULTS.items():
        if name not in given:
            shown = FLAGS[name].default
            before = "not limited" if value is None else value
            if shown is not None and shown != value:
                made.changes.append(
                    f"{FLAGS[name].option} is not given: its default is {shown}, and was {before}"
                )
    return made


def _with_yaml(words: Sequence[str]) -> Iterator[str]:
    """Replace ``--config FILE.yaml`` by the flags that are equal to its keys; flags of the command
    come later and win.
    """
    rest = list(words)
    if "--config" in rest[:-1]:
        place = rest.index("--config")
        path = Path(rest.pop(place + 1))
        rest.pop(place)
        yield from _flat("", load_yaml(path))
    yield from rest


def _with_files(words: Sequence[str]) -> Iterator[str]:
    """Replace ``@ FILE.toml`` by the flags of prime-rl that are equal to its keys, which after
    ``--trainer`` or another section are those of the section.
    """
    rest = list(words)
    section = ""
    while rest:
        word = rest.pop(0)
        if word.startswith("@"):
            path = Path(word[1:] or (rest.pop(0) if rest else ""))
            try:
                table = tomllib.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise CommandError(
                    f"{path} cannot be read: {error}; call this where the run is started"
                ) from None
            yield from _flat(section, table)
            section = ""
        elif word.startswith("--") and rest and rest[0].startswith("@"):
            section = f"{word[2:]}."
        else:
            key, equals, value = word.partition("=")
            names = f"--{key[2:].replace('-', '_')}" if key.startswith("--") else key
            yield names + equals + value


def _flat(section: str, table: Mapping[str, object]) -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(f"{section}{key}.", value)
            continue
        yield f"--{section}{key}"
        for one in value if isinstance(value, list) else [value]:
            yield str(one.get("id", one) if isinstance(one, dict) else one)
