"""A taskset of verifiers: write a letter, which a tool may tell."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Letters"]


class LetterConfig(vf.TaskConfig):
    looks_up: bool = False


class LettersConfig(vf.TasksetConfig):
    task: LetterConfig = LetterConfig()
    count: int = 4
    fails: bool = False


class LetterData(vf.TaskData):
    letter: str
    fails: bool = False


class Alphabet(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def letter_at(self, place: int) -> str:
        """The letter at a place of the alphabet, from 0."""
        return "abcd"[place]


class Letter(vf.Task[LetterData, vf.State, LetterConfig]):
    @classmethod
    def toolsets(cls, config: LetterConfig) -> list[vf.Toolset]:
        return [Alphabet(vf.ToolsetConfig())] if config.looks_up else []

    @vf.reward
    async def share(self, task: LetterData, trace: vf.Trace) -> float:
        """The share of the letter in what the model said last."""
        if task.fails:
            raise RuntimeError("no score today")
        said = trace.branches[-1].messages[-1].content or ""
        return said.count(task.letter) / max(len(said), 1)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.branches[-1].messages[-1].content or "") <= 2)


class Letters(vf.Taskset[Letter, LettersConfig]):
    def load(self) -> Iterator[Letter]:
        for number in range(self.config.count):
            letter = "abcd"[number % 4]
            yield Letter(
                LetterData(
                    prompt=f"Write {letter}.",
                    system_prompt="Be brief.",
                    letter=letter,
                    fails=self.config.fails,
                ),
                self.config.task,
            )


if __name__ == "__main__":  # the process of a tool server
    Alphabet.run()
