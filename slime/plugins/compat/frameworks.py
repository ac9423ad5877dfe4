"""The tables of flags of other frameworks, and what a command of theirs is here."""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NotRequired, TypedDict

from slime.config import settings
from slime.config.args import FLAGS

TARGET = re.compile(r"(--[\w-]+)(?: (\S+?))?(?::(\w+))?")
"""A flag of slime with a fixed first value and the form of its value; any other text is a
sentence.
"""
_SECRET = re.compile(r"\$\{\w+\}")
_SWITCHES = ("on", "off", "given", "is_", "has_")
_KEY = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@]*=")
_TABLE = Path(settings.__file__).parent / "tables" / "translations.json"


class Framework(TypedDict):
    """The table of one framework.

    ``flags``: for each of its flags, the flag of slime, or a sentence where there is none. After a
    colon comes what becomes of the value: ``on`` and ``off`` (a switch, if the value is true or
    false), ``given`` (a switch for any value), ``per_group``, ``per_engine``, ``groups``
    (multiplied or divided by the group size or engine size), ``kl`` and ``loss`` (the KL in the
    loss), ``ulysses`` (ranks that exchange heads).
    ``is_X``: a switch for the value X; ``reward``: see ``rewards``. Two flags with ``+`` between them
    get a value each.
    ``values``: other values, by flag of slime.
    ``defaults``: the values that its flags have where they are not given, as far as slime's are
    others. ``implied``: the same for a flag that is given.
    ``rewards``: the flag of slime for its reward functions. ``notes``: sentences for each command.
    """

    flags: dict[str, str]
    values: dict[str, dict[str, str]]
    defaults: NotRequired[dict[str, str]]
    implied: NotRequired[dict[str, dict[str, str]]]
    rewards: NotRequired[dict[str, str]]
    notes: NotRequired[list[str]]


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
    guessed: bool = False

    def add(self, words: list[str]) -> None:
        """Add a flag that is not there yet."""
        if words[0] not in [flag[0] for flag in self.flags]:
            self.flags.append(words)

    def command(self) -> str:
        """Return the command as bash reads it, one flag a line."""
        lines = [
            f"python3 {self.program}",
            *(" ".join(_quoted(word, self.guessed) for word in words) for words in self.flags),
        ]
        return " \\\n    ".join(lines)


def of_other(table: Framework, command: Sequence[str]) -> Translation:
    made = Translation("train.py")
    words = pairs_of(command[1:], keys="data.train_files" in table["flags"])
    pairs = [(_spelled(table, option), values) for option, values in words]
    given = {option for option, _ in pairs}
    on = {option for option, values in pairs if not values or _is_true(values[0])}
    implied = {
        option: value
        for flag, more in table.get("implied", {}).items()
        if flag in on
        for option, value in more.items()
    }
    defaults = {**table.get("defaults", {}), **implied}
    value_of = {**defaults, **{option: values[0] for option, values in pairs if values}}
    # Sizes that other flags of the command are counted in.
    sizes = Sizes(
        group=_number(
            value_of,
            "actor_rollout_ref.rollout.n",
            "--num_generations",
            "--rollout.n_samples_per_prompt",
            "--n_samples_per_prompt",
            "--orchestrator.rollouts_per_example",
        ),
        engine=_number(value_of, "--vllm.tensor_parallel_size", "--vllm_tensor_parallel_size"),
        in_loss=not given.isdisjoint(("--use_kl_loss", "--algo.kl.use_loss")),
    )
    for option, values in pairs:
        target = table["flags"].get(option)
        if not _add(made, table, option, values, sizes):
            made.changes.append(
                f"{option}: {target}"
                if target
                else f"{' '.join([option, *values]).strip()}: slime has no flag that is known to mean "
                "the same"
            )
    # What is not given has their value and not slime's.
    for option, value in defaults.items():
        if option in given:
            continue
        other = Translation(made.program)
        _add(other, table, option, [value], sizes)
        there = {flag[0] for flag in made.flags}
        new = [flag for flag in other.flags if flag[0] not in there and not _is_default(flag)]
        made.flags += new
        made.changes += [
            f"{option} is not given: it is {value} there, so {' '.join(flag)} was added"
            for flag in new
        ]
    if ["--rollout-backend", "vllm"] in made.flags:
        made.flags = [[_OF_VLLM.get(words[0], words[0]), *words[1:]] for words in made.flags]
    if not given.isdisjoint(("--async_train", "--train.async_enable")):
        made.program = "train_async.py"
    return made


def _spelled(table: Framework, option: str) -> str:
    """Return an option as the table spells it; most parsers take ``-`` for ``_``."""
    other = option[:2] + option[2:].replace("-", "_")
    return other if option not in table["flags"] and other in table["flags"] else option


def _is_default(flag: Sequence[str]) -> bool:
    """Whether a flag says what slime does without it."""
    known = FLAGS.get(flag[0][2:].replace("-", "_"))
    if known is None or len(flag) != 2 or known.default is None:
        return False
    return str(known.default) == flag[1] or (
        isinstance(known.default, int | float) and float(known.default) == float(flag[1])
    )


@dataclass(frozen=True)
class Sizes:
    """What other flags of a command are counted in.

    Attributes:
        group: Samples of a prompt.
        engine: GPUs of an engine.
        in_loss: Whether the KL is in the loss.
    """

    group: int
    engine: int
    in_loss: bool


def _add(
    made: Translation, table: Framework, option: str, values: Sequence[str], sizes: Sizes
) -> bool:
    """Add what a flag of theirs is here, and return whether it is anything."""
    text = table["flags"].get(option, "")
    targets = [TARGET.fullmatch(part) for part in text.split(" + ")]
    if not all(targets):
        return False
    values = _divided(values)
    if len(targets) > 1 and len(values) != len(targets):
        return False
    for target, part in zip(
        targets, [[one] for one in values] if targets[1:] else [values], strict=True
    ):
        assert target is not None
        _add_one(made, table, option, target, part, sizes)
    return True


def _is_true(value: str) -> bool:
    return value.lower() not in ("false", "0", "none", "null", "no")


def _is_switched_on(form: str, values: Sequence[str]) -> bool:
    value = values[0] if values else "true"
    kind, _, name = form.partition("_")
    if kind == "is":
        return value.replace("-", "_") == name
    if kind == "has":
        return name in values or "all" in values
    return form == "given" or _is_true(value) == (form == "on")


def _divided(values: Sequence[str]) -> list[str]:
    """Return the entries of a list that is written as one word, ``[a,b]``, without their quotes."""
    if len(values) != 1 or not re.fullmatch(r"\[.*\]", values[0]) or values[0].startswith("[{"):
        return [value.strip("'\"") if value[:1] in "'\"" else value for value in values]
    return [one.strip(" '\"") for one in values[0][1:-1].split(",") if one.strip()]


def _add_one(
    made: Translation,
    table: Framework,
    option: str,
    target: re.Match[str],
    values: Sequence[str],
    sizes: Sizes,
) -> None:
    """Add a flag of slime to the translation, with the value that it has there."""
    flag = target[1]
    form = target[3] or ""
    fixed = [target[2]] if target[2] else []
    value = values[0] if values else "true"
    if form.startswith(_SWITCHES):
        if not _is_switched_on(form, values):
            made.changes += [f"{option} {value}: {flag} was not added"] if "_" in form else []
        else:
            made.flags.append([flag, *fixed])
        return
    if form == "reward":
        _add_rewards(made, table, option, values)
        return
    if form == "url" and "://" not in value:
        made.changes.append(
            f"{option} {value}: {flag} takes the URL of a server, so it was left out"
        )
        return
    if value.lower() in ("null", "none") or (form == "positive" and value in ("-1", "0")):
        made.changes.append(f"{option} {value}: {flag} was not given")
        return
    # A number in another unit.
    if form in ("per_group", "per_engine", "groups") and value.isdigit():
        count = (
            int(value) // sizes.group
            if form == "groups"
            else int(value) * (sizes.group if form == "per_group" else sizes.engine)
        )
        made.flags.append([flag, str(count)])
        if count != int(value):
            made.changes.append(f"{option} {value}: {flag} is {count}, {_COUNTS[form]}")
        return
    # The KL penalty, in the loss or in the reward.
    if form == "loss" and not sizes.in_loss:
        flag = "--kl-coef"  # without its --use_kl_loss, the KL is in the reward
    if form == "kl" and value in ("0", "0.0"):
        return
    if form == "kl":
        made.flags.append(["--use-kl-loss"])
    if form == "ulysses" and value != "1":
        made.flags.append(["--context-parallel-kind", "ulysses"])
    new = [table["values"].get(flag, {}).get(one, one) for one in values]
    if new != list(values):
        made.changes.append(f"{option} {' '.join(values)}: {flag} {' '.join(new)}")
    taken = FLAGS.get(flag[2:].replace("-", "_"))
    if len(new) > 1 and taken is not None and not taken.takes_list:
        made.changes.append(
            f"{option}: {flag} takes one value, so these were left out: {' '.join(new[1:])}"
        )
        new = new[:1]
    made.flags.append([flag, *fixed, *new])


def _add_rewards(made: Translation, table: Framework, option: str, names: Sequence[str]) -> None:
    known = table.get("rewards", {})
    for name in names:
        if name in known:
            made.flags.append(known[name].split())
        else:
            made.changes.append(
                f"{option} {name}: it gets lists of texts there; call it in a function "
                "async (args, sample) and name that with --custom-rm-path"
            )


def add_trl_sizes(made: Translation, words: Sequence[str]) -> None:
    """Add the sizes that follow from TRL's samples of a device and steps of accumulation.

    A rollout is ``steps_per_generation`` micro-batches of each device there, by default as many as
    are accumulated, and an optimizer step is the accumulated ones.
    """
    table = tables()["trl"]
    given = {_spelled(table, option): values[0] for option, values in pairs_of(words) if values}
    values = {**table.get("defaults", {}), **given}
    known = next((flag[1] for flag in made.flags if flag[0] == "--actor-num-gpus-per-node"), None)
    size = _number(values, "--per_device_train_batch_size")
    accumulated = _number(values, "--gradient_accumulation_steps")
    step = size * accumulated * int(known or 1)
    steps = _number(values, "--steps_per_generation", "--gradient_accumulation_steps")
    rollout = int(values.get("--generation_batch_size", size * steps * int(known or 1)))
    prompts = max(rollout // _number(values, "--num_generations"), 1)
    made.add(["--global-batch-size", str(step)])
    made.add(["--rollout-batch-size", str(prompts)])
    made.changes.append(
        f"--global-batch-size {step} is {size} samples of a device x {accumulated} accumulation "
        f"steps x {known or '1 (their number is not known: multiply by it)'} devices; a rollout has "
        f"{rollout} samples of {prompts} prompts"
    )


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


def pairs_of(words: Sequence[str], keys: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Split the words of a command into flags with their values. Words before the first flag come
    with an empty one. With ``keys``, ``key=value`` is a flag with one value, as Hydra reads it.
    """
    option: str = ""
    values: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        starts = word.startswith("--") or (keys and bool(_KEY.match(word)))
        if not starts:
            values.append(word)
            continue
        if option or values:
            yield option, values
        option, values = (key, [value]) if equals else (word, [])
        option = option.lstrip("+~") if not option.startswith("--") else option
    if option or values:
        yield option, values


def _number(values: Mapping[str, str], *names: str) -> int:
    return next((int(values[name]) for name in names if values.get(name, "").isdigit()), 1)


def _quoted(word: str, guessed: bool) -> str:
    """Quote a word for bash, but for the names of secrets, what a text says of variables that are
    not known, and the programs whose answer a script asks for.
    """
    if "$(python " in word:
        return f'"{word}"'
    open_ended = "$" in word and " " not in word if guessed else _SECRET.fullmatch(word)
    return word if open_ended else shlex.quote(word)
