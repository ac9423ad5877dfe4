"""The command-line parser. It is built from the config dataclasses and reports all problems
together.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypedDict, Unpack

from slime import registry
from slime.config import passthrough
from slime.config.args import FLAGS, Args, spellings, underscored
from slime.config.flag import Flag, did_you_mean
from slime.config.resolve import resolve_defaults, validate
from slime.config.rules import Run, idle_flags
from slime.config.settings import (
    apply_file,
    check_states,
    no_effect_notice,
    redacted,
    set_value,
    store,
    why_missing,
)


class ConfigError(ValueError):
    """Raised with all problems of the arguments at once.

    Attributes:
        problems: One line for each problem, which also says what to change.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        lines = (f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
        return "\n".join([f"{len(self.problems)} problems with the arguments", *lines])


AddArguments = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]
ExtraCheck = Callable[[Run], list[str]]

_TYPED = "typed options"
"""The attribute of argparse's result with the options of slime and their words."""
_EPILOG = """\
Flags of SGLang have the prefix --sglang- (--sglang-mem-fraction-static 0.7), flags of its router --router-.
Flags of Megatron have no prefix (--tensor-model-parallel-size 2). docs/en/reference/flags.md describes all flags,
including those that slime refuses and the reasons.
"""


class _Misuse(Exception):
    """Raised where argparse would print an error and exit."""


class FlagParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that raises instead of exiting, and that reads ``-1e-5`` as a number,
    not as an option.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")

    def error(self, message: str) -> NoReturn:
        raise _Misuse(message)


class _Help(argparse.HelpFormatter):
    """Wraps lines on a terminal. Elsewhere each flag is one line, so that ``grep`` finds whole
    sentences.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=46, width=120)

    def _format_action(self, action: argparse.Action) -> str:
        if sys.stdout.isatty():
            return super()._format_action(action)
        return f"  {self._format_action_invocation(action):<44}  {self._expand_help(action)}\n"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if action.dest not in FLAGS:
            return super()._format_action_invocation(action)
        flag = FLAGS[action.dest]
        return ", ".join(action.option_strings) + ("" if flag.is_bool else f" {metavar(flag)}")

    def _expand_help(self, action: argparse.Action) -> str:
        return (
            help_text(FLAGS[action.dest]) if action.dest in FLAGS else super()._expand_help(action)
        )


class _Note(argparse.Action):
    """Notes an option with its words. What they mean is read afterwards, as values of files are."""

    def __call__(
        self, _: object, namespace: object, words: object, option: str | None = None
    ) -> None:
        getattr(namespace, _TYPED).append((option, words))


@functools.cache
def _own_parser(prog: str | None) -> FlagParser:
    """The parser without user-defined arguments. It is cached, because building it takes 0.1 s;
    never add to it.
    """
    return build_parser(prog=prog)


def build_parser(
    add_custom_arguments: AddArguments | None = None, prog: str | None = None
) -> FlagParser:
    """Build the parser of all flags. The user's arguments come first, so that slime's flag replaces
    one of the same name (``conflict_handler="resolve"``)."""
    parser = FlagParser(
        prog=prog,
        usage="%(prog)s [flags] ${MODEL_ARGS[@]}",
        formatter_class=_Help,
        allow_abbrev=False,
        conflict_handler="resolve",
        epilog=_EPILOG,
    )
    if add_custom_arguments is not None:
        add_custom_arguments(parser)
    groups = {
        title: parser.add_argument_group(title)
        for title in dict.fromkeys(flag.group for flag in FLAGS.values())
    }
    for flag in FLAGS.values():
        options = [flag.option, *[f"--no-{flag.option[2:]}"] * (flag.kind == "toggle")]
        shown = argparse.SUPPRESS if flag.status == "refused" else "shown by _Help"
        _add(groups[flag.group], options, flag.name, shown)
    for option in passthrough.options():
        if option not in parser._option_string_actions:
            _add(parser, [option], option, argparse.SUPPRESS)
    return parser


def _add(parser: argparse._ActionsContainer, options: Sequence[str], dest: str, shown: str) -> None:
    default = argparse.SUPPRESS
    parser.add_argument(*options, dest=dest, action=_Note, nargs="*", default=default, help=shown)


def help_text(flag: Flag) -> str:
    """Return the ``--help`` line of a flag: its meaning and its default."""
    if flag.kind == "negative" or flag.derived or "Default" in flag.help:
        return flag.help
    if flag.is_bool:
        default = "on" if flag.default else "off"
    elif flag.default in (None, [], {}):
        default = "none"
    else:
        default = (
            " ".join(map(str, flag.default))
            if isinstance(flag.default, list)
            else str(flag.default)
        )
    return f"{flag.help} (default: {default})"


def metavar(flag: Flag) -> str:
    """Return the placeholder for the flag's value in ``--help`` and in the reference."""
    if flag.metavar:
        return flag.metavar
    if flag.choices:
        return "{" + ",".join([*map(str, flag.choices), *["FILE:CLASS"] * flag.or_hook]) + "}"
    by_kind = {"hook": "FUNCTION", "path": "PATH", "json": "JSON", "repeat": "FUNCTION"}
    by_type = {int: "N", float: "X", str: "TEXT"}
    return by_kind.get(flag.kind) or by_type.get(flag.value_type, "VALUE")


def read_command_line(
    argv: Sequence[str], add_custom_arguments: AddArguments | None = None, prog: str | None = None
) -> tuple[Args, list[str]]:
    """Parse the command line into unresolved :class:`Args`; also return all problems with the
    words.
    """
    # Not left to argparse: a cached parser would keep the first name.
    prog = prog or os.path.basename(sys.argv[0])
    parser = build_parser(add_custom_arguments, prog) if add_custom_arguments else _own_parser(prog)
    theirs: list[str] = []
    namespace, rest, misused = _parse(parser, argv)
    problems = _unknown(parser, rest)
    # Asking another program for its flags can take seconds. So this happens only for flags that are
    # unknown otherwise, and with a parser of its own: the cached one must stay as it is.
    others = [
        registry.find("other flags", name)() for name in registry.parts("other flags") if problems
    ]
    if any(others):
        known = set(parser._option_string_actions)
        parser = build_parser(add_custom_arguments, prog)
        wrong = [add(parser) for add in others if add is not None]
        namespace, rest, misused = _parse(parser, argv)
        problems = [*_unknown(parser, rest), *filter(None, wrong)]
        words = {word.partition("=")[0] for word in argv}
        theirs = sorted(words & (set(parser._option_string_actions) - known))
    args = Args()
    if theirs:
        args.notices.append(
            f"{', '.join(theirs)}: flags of Megatron-LM that slime ignores; your functions may "
            "use them"
        )
    values = vars(namespace)
    typed = values.pop(_TYPED)
    # The user's own arguments are stored as argparse returned them.
    for name, value in values.items():
        setattr(args, name, value)
    return args, misused + problems + _store(vars(args), typed)


def _parse(
    parser: FlagParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Return the values, the words that are left, and what is wrong with an argument of the
    user's.
    """
    namespace = argparse.Namespace(**{_TYPED: []})
    try:
        return *parser.parse_known_args(argv, namespace), []
    except _Misuse as error:
        # Without their values, flags that were given would be reported as missing.
        namespace = argparse.Namespace(**{_TYPED: []})
        _own_parser(parser.prog).parse_known_args(argv, namespace)
        return namespace, [], [str(error)]


def _store(attributes: passthrough.Attributes, typed: Sequence[tuple[str, list[str]]]) -> list[str]:
    """Convert and store the words of each option, and return the problems."""
    words_of: dict[str, list[str]] = {}
    for option, words in typed:
        # Of an option that is typed twice, the last words count, unless it can be repeated.
        before = words_of.pop(option, [])
        repeats = spellings()[underscored(option)].flag.kind in ("pairs", "repeat")
        words_of[option] = [*before, *words] if repeats else words
    problems = []
    for option, words in words_of.items():
        known = spellings()[underscored(option)]
        flag = known.flag
        value: object = words
        if flag.is_bool and not words:
            value = True
        elif len(words) == 1 and not flag.is_bool and not flag.takes_list:
            value = words[0]
        # An option of another program may be an empty list.
        if not words and flag.takes_list and known.family is None:
            problems.append(f"{option}: it takes at least one value, but has none")
        elif problem := store(attributes, flag.option, known, value):
            problems.append(problem)
    return problems


def _unknown(parser: argparse.ArgumentParser, rest: Sequence[str]) -> list[str]:
    """Describe each unknown flag in one line, with the most similar flag that exists."""
    known = [option for option in parser._option_string_actions if option.startswith("--")]
    problems = []
    for position, word in enumerate(rest):
        option = word.partition("=")[0]
        if not option.startswith("--"):
            # Words after an unknown flag are probably its values and are not reported as well.
            if not any(earlier.startswith("--") for earlier in rest[:position]):
                problems.append(f"{word!r} does not belong to any flag")
        elif option not in known:
            reason = why_missing(option)
            problems.append(
                f"{option} {reason}"
                if reason
                else f"{option}: no such flag{did_you_mean(option.replace('_', '-'), known)}"
            )
    return problems


class Sources(TypedDict, total=False):
    """What :func:`check_args` takes besides the command line."""

    asynchronous: bool
    extra_checks: Sequence[ExtraCheck]
    settings: Mapping[str, object] | None


def parse_args(
    argv: Sequence[str] | None = None,
    add_custom_arguments: AddArguments | None = None,
    **sources: Unpack[Sources],
) -> Args:
    """Parse, resolve and check the command line of train.py and train_async.py.

    Args:
        argv: The words after the program's name. Default: ``sys.argv[1:]``.
        add_custom_arguments: Adds the user's own arguments to the parser.
        asynchronous: True in train_async.py.
        extra_checks: Further checks, whose problems are reported together with those of the
            configuration. The caller includes the check of the data files, so the configuration
            does not look for these files itself.
        settings: Values by argument name. They take precedence over ``argv`` and over the files
            that it names.

    Raises:
        SystemExit: With status 2 after all problems were printed to stderr; with status 0 after
            ``--help``.
    """
    prog = os.path.basename(sys.argv[0]) or "slime"
    args, problems = check_args(argv, add_custom_arguments, **sources)
    if problems:
        title = "1 problem with the arguments\n" if len(problems) == 1 else ""
        print(f"{prog}: {title}{ConfigError(problems)}", file=sys.stderr)
        raise SystemExit(2)
    for notice in args.notices:
        print(f"{prog}: {notice}", file=sys.stderr)
    return args


def load_args(argv: Sequence[str] | None = None, **sources: Unpack[Sources]) -> Args:
    """Do the same as :func:`parse_args`, but raise :class:`ConfigError` and print nothing."""
    args, problems = check_args(argv, **sources)
    if problems:
        raise ConfigError(problems)
    return args


def check_args(
    argv: Sequence[str] | None = None,
    add_custom_arguments: AddArguments | None = None,
    *,
    asynchronous: bool = False,
    extra_checks: Sequence[ExtraCheck] = (),
    settings: Mapping[str, object] | None = None,
) -> tuple[Args, list[str]]:
    """Return the resolved arguments and all problems with them, without duplicates."""
    args, problems = read_settings(
        sys.argv[1:] if argv is None else argv, add_custom_arguments, settings
    )
    # What a refused flag says is told before what follows from other flags.
    refused, idle = check_states(args, args.explicit, FLAGS)
    args.notices += registry.failures()
    run = Run(args, asynchronous)
    problems += [*refused, *resolve_defaults(run), *validate(run)]
    # One notice lists all flags without effect, whatever the reason.
    idle += idle_flags(run)
    args.notices += no_effect_notice(idle)
    for check in extra_checks:
        problems += check(run)
    if problems:  # a name may be unknown because its package could not register it
        problems += registry.failures()
    return args, list(dict.fromkeys(problems))


def read_settings(
    argv: Sequence[str],
    add_custom_arguments: AddArguments | None = None,
    settings: Mapping[str, object] | None = None,
) -> tuple[Args, list[str]]:
    """Apply ``argv``, then the files that it names (``--custom-config-path``, then ``--override``),
    then ``settings``.

    Later sources take precedence. Derived defaults are not filled in yet."""
    args, problems = read_command_line(argv, add_custom_arguments)
    attributes = vars(args)
    if path := args.custom_config_path:
        problems += apply_file(attributes, path, "--custom-config-path", new_names=True)
    # Recipes are scaled to a machine by this file, so it comes after everything that the recipe
    # says.
    if args.override:
        problems += _apply_override(attributes, args.override)
    for name, value in (settings or {}).items():
        if problem := set_value(attributes, name, value):
            problems.append(problem)
    return args, problems


def _apply_override(attributes: passthrough.Attributes, file: str) -> list[str]:
    before = passthrough.every_value(attributes)
    problems = apply_file(attributes, file, "--override", new_names=False)
    if (
        before["ref_load"] is not None
        and attributes["ref_load"] == before["ref_load"] == before["hf_checkpoint"]
    ):
        # --ref-load named the model that the file replaces, so it follows
        attributes["ref_load"] = attributes["hf_checkpoint"]
    changed = [
        f"{name}: {redacted(name, before.get(name))} -> {redacted(name, value)}"
        for name, value in passthrough.every_value(attributes).items()
        if before.get(name) != value
    ]
    changes = "; ".join(changed) or "it changes nothing"
    attributes["notices"] += [f"--override {file}: {changes}"]
    return problems
