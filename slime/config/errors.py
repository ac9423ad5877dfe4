"""What is said when the configuration cannot work."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """Everything that is wrong with the arguments, told at once.

    Attributes:
        problems: one line each, with what to change.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__(str(self))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.problems,)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return "\n".join(f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1))
