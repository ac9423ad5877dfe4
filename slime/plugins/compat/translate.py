"""``slime translate <script or command>``: the command of slime for a launch script of slime 0.3,
verl, OpenRLHF, TRL or prime-rl, and what changes."""

from __future__ import annotations

import functools
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from slime.cli.errors import CommandError
from slime.config import flag_support
from slime.config.args import FLAGS
from slime.config.flag_support import why_missing
from slime.config.parser import read_command_line
from slime.plugins.compat.older import ORIGINAL_DEFAULTS
from slime.plugins.compat.script_words import command_of, read_script
from slime.plugins.megatron.flags import PERFORMANCE

TARGET = re.compile(r"(--[\w-]+)(?: (\S+?))?(?::(\w+))?")
"""A flag of slime with a fixed first value and the form of its value; any other text is a
sentence.
"""
_END = re.compile(r"[|;&]|\d*>")
"""The beginning of the word after a command: a pipe, another command, or where its output goes."""
_TABLE = Path(flag_support.__file__).parent / "tables" / "translations.json"


class Framework(TypedDict):
    """The table of one framework.

    ``flags``: for each of its flags, the flag of slime, or a sentence where there is none. After a
    colon comes what becomes of the value: ``on`` and ``off`` (a switch, if the value is true or
    false), ``given`` (a switch for any value), ``per_group``, ``per_engine``, ``groups``
    (multiplied or divided by the group size or engine size), ``kl`` and ``loss`` (the KL in the
    loss).
    ``values``: other values, by flag of slime.
    """

    flags: dict[str, str]
    values: dict[str, dict[str, str]]


@functools.cache
def tables() -> dict[str, Framework]:
    """Return the tables of all frameworks by name."""
    found: dict[str, Framework] = json.loads(_TABLE.read_text(encoding="utf-8"))
    return found


@dataclass
class Translation:
    """A command of slime: its program, its flags as groups of words, and what changes, one line
    each.
    """

    program: str
    flags: list[list[str]] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    def command(self) -> str:
        """Return the command as bash reads it, one flag a line."""
        lines = [
            f"python3 {self.program}",
            *(" ".join(map(_quoted, words)) for words in self.flags),
        ]
        return " \\\n    ".join(lines)


def translate(words: Sequence[str], say: Callable[[str], None] = print) -> int:
    """Print the command of slime and what changes.

    Args:
        words: The path of a script, or the words of a command.
        say: Called with each line.

    Raises:
        CommandError: There is no script and no known command.
    """
    words = [word for word in words if word != "--"]
    if not words:
        raise CommandError("give a launch script, or a command after --")
    script = len(words) == 1 and (Path(words[0]).suffix in (".sh", "") or Path(words[0]).is_file())
    framework, command = command_of(read_script(Path(words[0])) if script else list(words))
    if framework == "prime-rl":
        command = ["rl", *_with_files(command[1:])]
    made = _of_slime(command) if framework == "slime" else _of_other(tables()[framework], command)
    if framework == "prime-rl":  # it generates with vLLM, beside the training
        made.program = "train_async.py"
        made.flags.append(["--rollout-backend", "vllm"])
    say(made.command())
    say("")
    say("What changes:" if made.changes else "Nothing changes.")
    for change in made.changes:
        say(f"  {change}")
    return 0


def _of_slime(command: Sequence[str]) -> Translation:
    """Keep all flags that exist, and name those that do not, that have no effect, and the defaults
    that differ.
    """
    made = Translation(Path(command[0]).name)
    given = set()
    for option, values in _pairs(command[1:]):
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


def _of_other(table: Framework, command: Sequence[str]) -> Translation:
    made = Translation("train.py")
    pairs = list(_pairs(command[1:]))
    value_of = {option: values[0] for option, values in pairs if values}
    given = {option for option, _ in pairs}
    # Sizes that other flags of the command are counted in.
    group = _number(
        value_of,
        "actor_rollout_ref.rollout.n",
        "--num_generations",
        "--n_samples_per_prompt",
        "--orchestrator.rollouts_per_example",
    )
    engine = _number(value_of, "--vllm_tensor_parallel_size")
    for option, values in pairs:
        target = table["flags"].get(option)
        found = TARGET.fullmatch(target or "")
        if found:
            _add(made, table, option, found, values, group, engine, "--use_kl_loss" in given)
        elif target:
            made.changes.append(f"{option}: {target}")
        else:
            made.changes.append(
                f"{' '.join([option, *values])}: slime has no flag that is known to mean the same"
            )
    if ["--rollout-backend", "vllm"] in made.flags:
        made.flags = [[_OF_VLLM.get(words[0], words[0]), *words[1:]] for words in made.flags]
    if "--async_train" in given:
        made.program = "train_async.py"
    return made


def _add(
    made: Translation,
    table: Framework,
    option: str,
    target: re.Match[str],
    values: Sequence[str],
    group: int,
    engine: int,
    in_loss: bool,
) -> None:
    """Add a flag of slime to the translation, with the value that it has there."""
    flag = target[1]
    form = target[3]
    fixed = [target[2]] if target[2] else []
    value = values[0] if values else "true"
    true = value.lower() not in ("false", "0", "none", "null", "no")
    # A switch.
    if form in ("on", "off", "given"):
        if form == "given" or true == (form == "on"):
            made.flags.append([flag, *fixed])
        return
    # A number in another unit.
    if form in ("per_group", "per_engine", "groups") and value.isdigit():
        count = (
            int(value) // group
            if form == "groups"
            else int(value) * (group if form == "per_group" else engine)
        )
        made.flags.append([flag, str(count)])
        if count != int(value):
            made.changes.append(f"{option} {value}: {flag} is {count}, {_COUNTS[form]}")
        return
    # The KL penalty, in the loss or in the reward.
    if form == "loss" and not in_loss:
        flag = "--kl-coef"  # without its --use_kl_loss, the KL is in the reward
    if form == "kl":
        if value in ("0", "0.0"):
            return
        made.flags.append(["--use-kl-loss"])
    known = table["values"].get(flag, {})
    new = [known.get(one, one) for one in values]
    if new != list(values):
        made.changes.append(f"{option} {' '.join(values)}: {flag} {' '.join(new)}")
    made.flags.append([flag, *fixed, *new])


_OF_VLLM = {
    "--sglang-mem-fraction-static": "--vllm-gpu-memory-utilization",
    "--sglang-disable-cuda-graph": "--vllm-enforce-eager",
    "--sglang-context-length": "--vllm-max-model-len",
    "--sglang-max-running-requests": "--vllm-max-num-seqs",
}
"""What verl's flags for either engine are called for vLLM."""

_COUNTS = {
    "per_group": "which counts samples, not prompts",
    "per_engine": "which counts GPUs, not engines",
    "groups": "which counts prompts, not samples",
}


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Split the words of a command into flags with their values; ``key=value`` is a flag with one
    value.
    """
    option: str | None = None
    values: list[str] = []
    ends = False
    # A command ends where the shell would end it.
    for written in words:
        if ends or _END.match(written):
            break
        word = written.removesuffix(";")
        ends = written.endswith(";")
        key, equals, value = word.partition("=")
        starts = word.startswith("--") or bool(
            equals and "." in key and not key.startswith(("/", "{"))
        )
        if not starts:
            values.append(word)
            continue
        if option is not None:
            yield option, values
        option, values = (key, [value]) if equals else (word, [])
        option = option.lstrip("+~") if not option.startswith("--") else option
    if option is not None:
        yield option, values


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


def _number(values: Mapping[str, str], *names: str) -> int:
    return next((int(values[name]) for name in names if values.get(name, "").isdigit()), 1)


def _quoted(word: str) -> str:
    return word if "$" in word and " " not in word else shlex.quote(word)
