"""YAML files that set flags, the resolved settings as one mapping without secrets, and why a flag is
refused, has no effect or does not exist.

``--custom-config-path`` is applied after the command line, ``--override`` after that, and
``--megatron-config-path`` changes the arguments of one role (actor or critic). All of them are
applied before the checks.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from slime.config.args import Args, spellings, underscored
from slime.config.files import read_yaml
from slime.config.flag import Flag, OutOfRange, convert, defaults_of, did_you_mean, flags_of, shown
from slime.config.hf_config import is_hf_folder
from slime.config.layout import ParallelLayout, check_shard_size, check_split
from slime.config.passthrough import Attributes, Spelling, every_value, prefix_of, programs
from slime.registry import find, parts

HIDDEN = "***"
_SECRET = re.compile(
    r"passw(or)?d|passphrase|passcode|secret|credential|bearer|authorization|webhook|(^|_)(pwd|pass|dsn)$"
    r"|(^|_)(api|access|private|account|auth|client|service|wandb|hf|license)_?keys?($|_)"
    r"|apikey|(^|_)keys?$|(^|_)(auth|access|api|hf|hub|refresh|session|github|gh|slack|bot)_?token(s?$|_)|(^|_)token$"
)
_OF_DATA = re.compile(
    r"(^|_)(input|label|metadata|tool|reward|multimodal|routing|prompt|sort|group|cache|primary)_keys?$"
    r"|(^|_)(pad|eos|bos|eot|unk|mask|sep|cls|stop|image|video|audio|end|start|think|special|per|first|last|new)_token$"
)
_PATH = re.compile(r"_(path|file|dir|name)$")
_USER_OF_URL = re.compile(r"(?<=://)[^/\s@'\"]+@")
_TOLD = re.compile(
    r"(?i)(\b(?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?(?:[a-z]+\s+)?|\bbearer\s+|\s-k\s+(?=[^\s-])|\s-u\s+\S+?:"
    r"|https?://[^\s/'\"]*\bhooks?\.[^\s/'\"]*/|https?://[^\s'\"]*/webhooks?/)[^\s'\",}]+"
)
"""Secrets that follow what tells of them: in headers, as ``curl`` and agents take them, and in
paths of webhooks.
"""
_KNOWN_FORM = re.compile(
    r"\b(?:sk-|sk_|hf_|gh[pousr]_|github_pat_|glpat-|xox[abeprs]-|AKIA|AIza|eyJ[\w-]+\.)[\w.-]{12,}"
)
"""Keys of services that are known by how they begin, and JSON web tokens."""
_OPTION = re.compile(
    r"(?P<name>-{1,2}[A-Za-z][\w-]*)(?P<gap>=| +)(?P<value>'[^']*'|\"[^\"]*\"|[^\s'\"-][^\s'\"]*)"
    r"|(?P<variable>\b[A-Za-z_]\w*)=(?:'[^']*'|\"[^\"]*\"|[^\s'\"]+)"
    r"|(?P<field>\b[A-Za-z][\w-]*['\"]?: *)(?:'[^']*'|\"[^\"]*\"|[^\s'\",}]+)"
)
_ENVIRONMENT = "train_env_vars"
_NO_SECRET = re.compile(r"(TORCH|NCCL)_")
"""Variables whose values ``slime doctor`` needs. All others of the training processes may hold a
secret.
"""


def is_secret(name: str) -> bool:
    """Whether the value of a setting or variable with this name is a secret. ``wandb_key``,
    ``OPENAI_API_KEY`` and ``ssl_keyfile_password`` are secrets; ``input_key`` (a column) and
    ``max_tokens`` are not."""
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return bool(_SECRET.search(plain)) and not _OF_DATA.search(plain) and not _PATH.search(plain)


def redacted(name: str, value: object) -> object:
    """Return ``value`` with secrets replaced by :data:`HIDDEN`, also inside mappings, lists, URLs
    and commands.
    """
    if is_secret(name) and value not in (None, "", False, [], {}):
        return HIDDEN
    if isinstance(value, Mapping) and name == _ENVIRONMENT:
        return {
            key: redacted(str(key), item) if _NO_SECRET.match(str(key)) else HIDDEN
            for key, item in value.items()
        }
    if isinstance(value, Mapping):
        return {key: redacted(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (
            type(value)(redacted("", item) for item in value)
            if type(value) in (list, tuple)
            else value
        )
    return redacted_text(value) if isinstance(value, str) else value


def redacted_text(text: str) -> str:
    """Hide the user part of URLs, the values of options, headers and variables that are secrets,
    and keys of a known form, in a text."""
    # From what is certain to what is likely: a key of a known form is hidden wherever it stands.
    text = _USER_OF_URL.sub(f"{HIDDEN}@", text)
    text = _KNOWN_FORM.sub(HIDDEN, _TOLD.sub(rf"\g<1>{HIDDEN}", text))

    def hide(match: re.Match[str]) -> str:
        if field := match["field"]:
            # "key: 3" and "token: 3" are rather words of a message.
            hidden = is_secret(field.rstrip(" :'\"")) and not re.match(
                r"(?i)(keys?|token|.*authorization)\b", field
            )
            return f"{field}{HIDDEN}" if hidden else match[0]
        if match["variable"]:
            return f"{match['variable']}={HIDDEN}" if is_secret(match["variable"]) else match[0]
        return f"{match['name']}{match['gap']}{HIDDEN if is_secret(match['name']) else redacted_text(match['value'])}"

    return _OPTION.sub(hide, text) if set("-=:") & set(text) else text


def redacted_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the values of secret options hidden (``--wandb-key
    ***``).
    """
    shown: list[str] = []
    hide = False
    for word in words:
        name, equals, _ = word.partition("=")
        option = word.startswith("-")
        if hide and not option:
            shown.append(HIDDEN)
        elif option and equals and _hides(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(redacted_text(word))
        hide = _hides(word) and not equals if option else hide  # all values of a list are hidden
    return shown


def _hides(option: str) -> bool:
    return is_secret(option) or option.lstrip("-").replace("-", "_") == _ENVIRONMENT


RESERVED = frozenset(defaults_of(Args).keys() - flags_of(Args))
"""Attributes of the arguments that are not flags."""


def apply_file(attributes: Attributes, path: str, option: str, new_names: bool) -> list[str]:
    """Set every key of the file.

    Args:
        new_names: Whether a key that is not a flag becomes a new attribute. Otherwise it is a
            problem.

    Returns:
        Problems, one line each.
    """
    content, problems = read_yaml(path, option)
    if content.keys() >= RESERVED:  # only the config.yaml of a run contains all derived attributes
        content = _of_a_run(content)
    return problems + [
        f"{option} {path}: {problem}"
        for key, value in content.items()
        if (problem := set_value(attributes, str(key), value, new_names))
    ]


def _of_a_run(content: dict[str, Any]) -> dict[str, Any]:
    """Extract the settings from the config.yaml of a run. Derived values and hidden secrets are
    left out, and the pass-through flags get their full names."""
    left_out = {*RESERVED, *programs(), "override"}
    # A hidden value would replace the real one by three stars.
    settings = {
        key: value for key, value in content.items() if key not in left_out and value != HIDDEN
    }
    if isinstance(variables := settings.get(_ENVIRONMENT), dict):
        settings[_ENVIRONMENT] = {
            name: value for name, value in variables.items() if value != HIDDEN
        }
    for family in programs():
        if isinstance(given := content.get(family), dict):
            settings |= {
                prefix_of(family) + name: value for name, value in given.items() if value != HIDDEN
            }
    return settings


def set_value(
    attributes: Attributes, key: str, value: object, new_names: bool = False
) -> str | None:
    """Set one flag by name in the attributes of the arguments, and return the problem, if any. The
    value None restores the default of the flag.
    """
    name = underscored(key)
    if name in RESERVED or name in programs() or name.startswith("__"):
        return f"{key}: slime sets this itself"
    if name == "override" and not new_names:
        return f"{key}: an --override file cannot name another --override file"
    if known := spellings().get(name):
        return store(attributes, key, known, value)
    if name in attributes or (new_names and not hasattr(Args, name)):
        attributes[name] = value
        attributes["explicit"] |= {name}
        return None
    if reason := why_missing(f"--{name}"):
        return f"{key} {reason}"
    return f"{key}: no such flag{did_you_mean(name, spellings())}"


def store(attributes: Attributes, key: str, known: Spelling, value: object) -> str | None:
    """Convert a value and store it; return the problem, if any, which begins with ``key``."""
    flag = known.flag
    values = known.values(attributes)
    if value is not None:
        try:
            converted = convert(flag, value)
        except OutOfRange as error:
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            return f"{key} {shown}: {error}"
        except ValueError as error:
            return f"{key}: {error}"
        # disable_x: true sets x to False
        values[flag.name] = converted if known.sets else not converted
    elif known.family is None:
        values[flag.name] = flag.default
    else:
        values.pop(flag.name, None)
    if known.family is None:
        attributes["explicit"] |= {flag.name}
    return None


ROLES = ("actor", "critic")


_IGNORED = ("num_nodes", "num_gpus_per_node")  # --critic-num-nodes, --critic-num-gpus-per-node


_ROLES_OPTION = "--megatron-config-path"


def role_args(args: Args, role: str) -> Args:
    """Return the arguments of one role. :func:`check_roles` must have found no problem before."""
    args = _changed(args, role)[0]
    if role == "critic" and args.critic_load and is_hf_folder(args.critic_load):
        args = args.with_values(load=args.critic_load)
    if role == "critic" and args.critic_gpus:
        # Nobody else needs the memory of its GPUs.
        args = args.with_values(
            world_size=args.critic_gpus, offload_train=False, offload_rollout=False
        )
    return args


def check_roles(args: Args) -> list[str]:
    """Check the file of ``--megatron-config-path``, and how a critic with GPUs of its own is
    divided over them."""
    path = args.megatron_config_path
    content, problems = read_yaml(path, _ROLES_OPTION) if path else ({}, [])
    problems += [
        f"{_ROLES_OPTION}: {name!r} is not {' or '.join(ROLES)}"
        for name in content
        if name not in ROLES
    ]
    for role in ROLES:
        changed, wrong = _changed(args, role)
        problems += [f"{_ROLES_OPTION}: {role}: {problem}" for problem in wrong]
        if wrong or (role == "critic" and args.critic_gpus):
            continue
        if ParallelLayout.from_args(changed) != ParallelLayout.from_args(args):
            problems.append(
                f"{_ROLES_OPTION}: {role} has another parallel layout, but both roles share one "
                "(--critic-num-gpus-per-node gives the critic GPUs of its own)"
            )
    return problems or (_check_critic(role_args(args, "critic")) if args.critic_gpus else [])


def _check_critic(critic: Args) -> list[str]:
    """Check the arguments of a critic with GPUs of its own."""
    layout = ParallelLayout.from_args(critic)
    checks = (
        layout.problems(),
        check_shard_size(
            critic.fsdp_shard_size, critic.world_size, critic.fsdp_expert_parallel_size
        ),
        check_split(layout, batch=critic, rollout=critic),
    )
    return [f"the critic: {problem}" for problems in checks for problem in problems]


def _changed(args: Args, role: str) -> tuple[Args, list[str]]:
    if not args.megatron_config_path:
        return args, []
    values: Any = read_yaml(args.megatron_config_path, _ROLES_OPTION)[0].get(role) or {}
    if not isinstance(values, dict):
        return args, [f"needs a mapping of flag names to values, not a {type(values).__name__}"]
    # The roles must not share dicts such as args.megatron.
    changed = copy.deepcopy(args)
    told = (
        set_value(vars(changed), str(name), value)
        for name, value in values.items()
        if name not in _IGNORED
    )
    return changed, [problem for problem in told if problem]


def to_dict(attributes: Attributes) -> dict[str, Any]:
    """Return all flags with their resolved values, the pass-through flags that were given, and
    attributes of hooks.

    The mapping is also a valid ``--override`` file, except for derived values (``use_critic``,
    ``world_size``). Secrets are None.
    """
    return {
        name: _shown(name, value)
        for name, value in every_value(attributes).items()
        if name != "override" and _plain(value)
    }


def _shown(name: str, value: object) -> object:
    # None for a secret: if the mapping is used as an override, it means that the flag is not given.
    return None if is_secret(name) else redacted(name, value)


def _plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def check_states(
    values: object, explicit: Collection[str], flags: Mapping[str, Flag]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the problems of refused flags that the user set, and each flag without effect with the
    reason.
    """
    problems: list[str] = []
    idle: list[tuple[str, str]] = []
    for name, entry in flags.items():
        value = getattr(values, name)
        if name not in explicit or value in (None, entry.default):
            continue
        words = value if isinstance(value, str) else shown(value)
        typed = entry.option if entry.is_bool or entry.takes_list else f"{entry.option} {words}"
        if entry.status == "notice":
            idle.append((typed, entry.reason))
        elif entry.status == "refused":
            problems.append(f"{typed} is not supported: {entry.reason}")
    return problems, idle


def no_effect_notice(idle: Sequence[tuple[str, str]]) -> list[str]:
    """Return one notice for all flags without effect, or none. Each has the words of the flag and
    the reason.
    """
    if len(idle) < 2:
        return [f"{typed} has no effect: {reason}" for typed, reason in idle]
    return [
        "these flags have no effect:" + "".join(f"\n  {typed}: {reason}" for typed, reason in idle)
    ]


def why_missing(option: str) -> str | None:
    """Explain why a flag does not exist; None if no registered part knows.

    Args:
        option: The flag with its ``--``; ``_`` and ``-`` are equivalent.
    """
    words = option.replace("_", "-")
    known = (find("missing flag", name)(words) for name in parts("missing flag"))
    return next(filter(None, known), None)
