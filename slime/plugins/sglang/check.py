"""Check whether the installed SGLang and router accept the options that they will be started with.

slime parses its flags without knowing which release is installed. So some errors are only found
here: options and values of another release, and the overrides of a server group. All errors are
reported at once, before any engine is started. A release that has a table is not imported, which
would take 8 to 20 s on a machine with a GPU. Others are asked in a subprocess.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from slime.config.machine import cache_folder, installed, remember, version_of
from slime.config.process import import_environment, module_command

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.config.passthrough import TableEntry
    from slime.engines.launch import EngineSettings, EngineSpec, RouterSettings

CHECK_SECONDS = 300.0
_MARK = "@@slime "


def check_server_options(args: Args) -> Iterable[str]:
    """Let the installed SGLang and router check the options of the run's servers, while other
    checks go on: the problems are waited for when they are read.
    """
    from slime.config.engine import ServerGroupError
    from slime.engines.launch import EngineSettings, RouterSettings, plan_engines

    if args.debug_train_only:
        return []
    try:
        specs = plan_engines(args)
    except (ServerGroupError, OSError):  # The checks of the configuration report a wrong plan.
        return []
    asked = ThreadPoolExecutor(1).submit(
        check_launch, EngineSettings.from_args(args), RouterSettings.of(args, args.router), specs
    )
    return chain.from_iterable(answer.result() for answer in (asked,))


def check_launch(
    settings: EngineSettings, router: RouterSettings, specs: Sequence[EngineSpec]
) -> list[str]:
    """Return the options that the SGLang and the router installed here do not accept, one message
    for each.

    Nothing is checked if the user gave no options, or for software that is not installed on this
    host. Options that releases without a table have accepted before are not checked again.
    """
    from slime.plugins.sglang.launch import ServerPlace, runs_on_cpu, server_words
    from slime.plugins.sglang.options import ROUTER, SGLANG

    # Only what the user has given can be wrong. Groups with the same options are asked about once.
    lines: dict[str, list[str]] = {}
    if settings.backend == "sglang" and installed("sglang"):
        for spec in specs:
            if settings.sglang or spec.options:
                words = server_words(settings, spec, ServerPlace("127.0.0.1", 1))
                lines.setdefault(json.dumps(spec.options, sort_keys=True), words)
    asked = {
        "sglang": list(lines.values()),
        "router": [router.words] if router.options else [],
    }
    problems: list[str] = []
    for prefix, program in (("sglang", SGLANG), ("router", ROUTER)):
        version = program.installed or ""
        if table := program.by_version.get(version):
            parser = parser_of(table)
            for words in asked.pop(prefix):
                problems += problems_of(parser, words, prefix, version)
    if any(asked.values()):
        # The process must import SGLang as the server will, also on a CPU.
        problems += _ask(asked, bool(asked.get("sglang")) and runs_on_cpu(settings, specs[0]))
    return list(dict.fromkeys(problems))


def parser_of(table: Mapping[str, TableEntry]) -> ServerParser:
    """Return the parser of a release as its table describes it."""
    parser = ServerParser(allow_abbrev=False, add_help=False)
    for option, entry in table.items():
        if entry["kind"] in ("value", "list"):
            parser.add_argument(
                option,
                nargs="*" if entry["kind"] == "list" else None,
                type={"int": int, "float": float}.get(entry.get("type", ""), str),
                choices=entry.get("values"),
            )
        else:
            parser.add_argument(option, action="store_true")
    return parser


def _ask(asked: Mapping[str, Sequence[Sequence[str]]], cpu: bool) -> list[str]:
    """Let releases without a table check options in a subprocess, unless they have accepted the
    same ones before.
    """
    env = {**os.environ, **import_environment(), **({"SGLANG_USE_CPU_ENGINE": "1"} if cpu else {})}
    command = module_command("slime.plugins.sglang.check")
    text = json.dumps(asked)
    accepted = _mark_of_acceptance(text, cpu)
    if accepted.is_file():
        return []
    try:
        answer = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            env=env,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [
            f"SGLang and its router did not say within {CHECK_SECONDS:.0f} s which options they "
            "have"
        ]
    # Other output of SGLang may surround the line with the result.
    result = next((line for line in answer.stdout.splitlines() if line.startswith(_MARK)), None)
    if result is None:
        tail = answer.stderr.strip()[-2000:]
        return [
            "SGLang and its router could not be asked for their options (exit "
            f"{answer.returncode}):\n"
            f"{tail}"
        ]
    problems: list[str] = json.loads(result.removeprefix(_MARK))
    if not problems:
        remember(accepted)
    return problems


def _mark_of_acceptance(asked: str, cpu: bool) -> Path:
    """Return the file that exists if the programs installed here have accepted the options
    ``asked`` before.
    """
    versions = {name: version_of(name) for name in ("sglang", "sglang-router")}
    key = json.dumps(
        [asked, cpu, sys.prefix, os.environ.get("PYTHONPATH", ""), versions], sort_keys=True
    )
    return (
        cache_folder("accepted-options") / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    )


class _Refused(Exception):
    """The error message of argparse."""


class ServerParser(argparse.ArgumentParser):
    """The parser of SGLang's options, which raises an error where argparse would end the
    process.
    """

    def error(self, message: str) -> NoReturn:
        raise _Refused(message)


def problems_of(
    parser: argparse.ArgumentParser, words: Sequence[str], prefix: str, version: str
) -> list[str]:
    """Return the arguments that ``parser`` does not accept, in the form in which the user typed
    them (``--sglang-…``).

    Args:
        words: The command-line arguments.
        prefix: ``sglang`` or ``router``, the prefix of slime's flags for the program.
    """
    owner = {"sglang": "SGLang", "router": "sglang-router"}[prefix]
    known = list(parser._option_string_actions)
    problems = []
    for word in words:
        if word.startswith("--") and word not in known:
            near = [
                f"--{prefix}-{name[2:]}" for name in difflib.get_close_matches(word, known, n=1)
            ]
            hint = f"; did you mean {near[0]}?" if near else ""
            problems.append(
                f"--{prefix}-{word[2:]}: the installed {owner} {version} has no such option{hint}"
            )
    if problems:
        return problems
    try:
        parser.parse_args(list(words))
    except _Refused as refused:
        text = str(refused).replace("argument --", f"--{prefix}-")
        return [f"{text} (says {owner} {version})"]
    return []


def main() -> None:
    """Check the options that :func:`_ask` writes to stdin, and print the problems."""
    asked: dict[str, Any] = json.load(sys.stdin)
    problems: list[str] = []
    if asked.get("sglang"):
        problems += _ask_sglang(asked["sglang"])
    if asked.get("router"):
        from importlib.metadata import version

        from sglang_router.router_args import RouterArgs

        parser = ServerParser(allow_abbrev=False)
        RouterArgs.add_cli_args(parser, use_router_prefix=False)
        problems += [
            p
            for words in asked["router"]
            for p in problems_of(parser, words, "router", version("sglang-router"))
        ]
    # the mark separates the result from other output on stdout
    print(_MARK + json.dumps(problems), flush=True)


def _ask_sglang(lines: Sequence[Sequence[str]]) -> list[str]:
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        from slime.plugins.sglang.kernels import install

        install()
    from importlib.metadata import version

    from sglang.srt.server_args import ServerArgs

    parser = ServerParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return [
        problem
        for words in lines
        for problem in problems_of(parser, words, "sglang", version("sglang"))
    ]


if __name__ == "__main__":
    main()
