"""Finds the environment that ``--environment NAME:WHAT?key=value`` names, and creates it once per process."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol
from urllib.parse import quote, unquote

import yaml

from slime.config.hooks import HookError, load_function
from slime.plugins.agents.environments.base import Environment, EnvironmentProblem
from slime.registry import find, parts
from slime.types import JsonValue


class Make(Protocol):
    """Creates an environment from what follows its name, and its options."""

    def __call__(self, what: str, /, **options: JsonValue) -> Environment: ...


_TEXTS = ("system", "tag")
"""Options of the adapters that are texts. YAML would cut them at `` #`` and make a mapping of one with a colon."""
_QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)


@dataclass(frozen=True)
class Spec:
    """A parsed value of ``--environment``: ``NAME:WHAT?key=value&key=value``.

    Attributes:
        name: The name of a registered environment, or the path of the user's own class; then ``what`` is empty.
        options: Values by name. A value is read as YAML, so ``3`` is a number and ``[1, 2]`` a list. The texts of the
            adapters (``system``, ``tag``) are taken as they are, unless they stand in quotes.
    """

    name: str
    what: str
    options: Mapping[str, JsonValue]

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Parse a value of the flag.

        Raises:
            EnvironmentProblem: An option is not ``key=value``, or there is no name.
        """
        head, _, query = text.partition("?")
        name, _, what = head.partition(":")
        if name not in parts("environment") and "." in head:
            name, what = head, ""
        options: dict[str, JsonValue] = {}
        for part in filter(None, query.split("&")):
            key, equals, value = part.partition("=")
            if not (equals and key.isidentifier() and value):
                raise EnvironmentProblem(f"the option {part!r} is not of the form key=value")
            if key in options:
                raise EnvironmentProblem(f"the option {key} is given twice")
            value = unquote(value)
            if name in parts("environment") and key in _TEXTS and not _QUOTED.fullmatch(value):
                options[key] = value
                continue
            try:
                options[key] = yaml.safe_load(value)
            except RecursionError:
                raise EnvironmentProblem(f"the value of {key} is nested too deeply") from None
            except (yaml.YAMLError, ValueError) as error:  # PyYAML raises a ValueError for an impossible date
                raise EnvironmentProblem(f"the value of {key} cannot be read: {' '.join(str(error).split())}") from None
        if not name:
            raise EnvironmentProblem("it has no name; the form is NAME:WHAT?key=value")
        return cls(name, what, options)

    def with_default(self, key: str, value: JsonValue) -> Spec:
        """Return a copy in which the option ``key`` has a value."""
        return replace(self, options={key: value, **self.options})

    def __str__(self) -> str:
        pairs = (f"{key}={quote(_text(value), safe='')}" for key, value in sorted(self.options.items()))
        return f"{self.name}{':' if self.what else ''}{self.what}?{'&'.join(pairs)}".removesuffix("?")


def _text(value: JsonValue) -> str:
    """Write a value so that YAML reads the same value."""
    return yaml.safe_dump(value, default_flow_style=True, width=2**30).removesuffix("...\n").strip()


def own_seed(text: str, seed: int) -> str:
    """Return the value of ``--environment`` in its full form, with the seed of the run if it has no ``seed`` of its
    own. The user's own environments get no option that they do not ask for."""
    spec = Spec.parse(text)
    return str(spec.with_default("seed", seed) if spec.name in parts("environment") else spec)


@functools.cache
def environment(text: str) -> Environment:
    """Create the environment of a value of ``--environment``, or return the one that this process has created.

    Raises:
        EnvironmentProblem: The name or an option is unknown, or a package is missing.
    """
    spec = Spec.parse(text)
    try:
        made: object
        if spec.name in parts("environment"):
            make: Make = find("environment", spec.name)
            made = make(spec.what, **spec.options)
        else:
            made = _own(spec.name)(**spec.options)
        count = len(made) if isinstance(made, Environment) else 1
    except EnvironmentProblem:
        raise
    # Packages and users' classes raise what they like for options that they do not accept. A script without a guard
    # for __main__ may exit, which would end the run without a word.
    except (Exception, SystemExit) as error:
        raise EnvironmentProblem(f"it cannot be created: {type(error).__name__}: {error}"[:2000]) from error
    if not isinstance(made, Environment):
        raise EnvironmentProblem(
            f"{spec.name} gives a {type(made).__name__}, not a slime.environments.base.Environment"
        )
    if count < 1:
        raise EnvironmentProblem("it has no tasks")
    return made


def _own(name: str) -> Callable[..., object]:
    if "." not in name:
        known = ", ".join(parts("environment"))
        raise EnvironmentProblem(f"there is no environment {name!r}: known are {known}, and file.py:Class of your own")
    try:
        found: Callable[..., object] = load_function(name)
    except HookError as error:
        raise EnvironmentProblem(str(error)) from error
    except (Exception, SystemExit) as error:  # The user's file can raise anything.
        raise EnvironmentProblem(f"importing {name} failed with {type(error).__name__}: {error}") from error
    return found


def missing_package(package: str, error: ImportError) -> EnvironmentProblem:
    """The error for a package that is not installed, or that lacks a part."""
    return EnvironmentProblem(
        f"the package {package} cannot be imported ({error}): install it with pip install 'slime-rl[{package}]', or "
        f"pip install {package}"
    )
