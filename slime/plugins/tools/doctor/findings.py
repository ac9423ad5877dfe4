"""A finding of a rule: what is wrong, the evidence, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slime.plugins.tools.doctor.facts import Facts


@dataclass(frozen=True)
class Finding:
    """One diagnosis.

    Attributes:
        kind: A short name, such as ``disk_full``.
        title: What is wrong, as a sentence.
        evidence: Lines of a log, or values of metrics, that show it.
        advice: What to do.
        hint: Whether nothing is broken, and the run could only be better.
    """

    kind: str
    title: str
    evidence: tuple[str, ...]
    advice: str
    hint: bool = False


Rule = Callable[[Facts], Iterator[Finding]]
