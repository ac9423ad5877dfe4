"""Odd values of ``--environment``: each is refused with a reason, or gives tasks that can be
read.
"""

from __future__ import annotations

import random
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from odd_values import TEXTS, numbers, value

from slime.plugins.agents.environments import EnvironmentProblem, environment, own_seed

CHUNKS = 10
OWN = """
from slime.plugins.agents.environments import Environment, Task

class Own(Environment):
    def __init__(self, tasks=3, **more):
        self.count = tasks

    def __len__(self):
        return self.count

    def task(self, number):
        return Task([{"role": "user", "content": str(number)}])

    async def start(self, number, limits):
        raise NotImplementedError

def broken(**more):
    raise SystemExit(0)
"""
NAMES = (
    "gymnasium",
    "gymnasium",
    "reasoning_gym",
    "reasoning_gym",
    "openenv",
    "verifiers",
    "harbor",
    "nemo_gym",
    "own.py",
    "nothing",
)
WHATS = (
    "FrozenLake-v1",
    "CartPole-v1",
    "chain_sum",
    "basic_arithmetic",
    "Own",
    "broken",
    "http://127.0.0.1:1",
    "x:y",
)
KEYS = (
    "tasks",
    "seed",
    "size",
    "system",
    "tag",
    "action",
    "min_terms",
    "max_terms",
    "is_slippery",
    "map_name",
    "id",
)
TERMS = ("size", "min_terms", "max_terms")
Random = random.Random


def spec(random_: Random, folder: Path) -> str:
    name, what = random_.choice(NAMES), random_.choice(WHATS if random_.random() < 0.8 else TEXTS)
    head = f"{folder}/own.py:{what}" if name == "own.py" else f"{name}:{what}"
    pairs = []
    for _ in range(random_.randrange(4)):
        key = random_.choice(KEYS)
        # A package builds as many terms as it is told, until memory ends.
        found = (
            random_.randrange(1, 9) if random_.random() < 0.5 or key in TERMS else value(random_)
        )
        text = yaml.safe_dump(found, default_flow_style=True).removesuffix("...\n").strip()
        text = text if random_.random() < 0.8 or key in TERMS else random_.choice(TEXTS)
        pairs.append(f"{key}={quote(text, safe='') if random_.random() < 0.8 else text}")
    made = f"{head}?{'&'.join(pairs)}" if pairs else head
    if random_.random() < 0.1:
        at = random_.randrange(len(made))
        made = (
            made[:at] + random_.choice(("?", "&", "=", ":", "%", "\0", "\ud800", "é")) + made[at:]
        )
    return made


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_values(tmp_path: Path, chunk: int) -> None:
    (tmp_path / "own.py").write_text(OWN)
    for case in numbers(chunk, CHUNKS):
        text = spec(Random(f"environment {case}"), tmp_path)
        try:
            whole = own_seed(text, 42)
            assert own_seed(whole, 7) == whole, (case, text)
            made = environment(whole)
            assert len(made) >= 1 and made.task(len(made) - 1).prompt, (case, text)
        except EnvironmentProblem as problem:
            assert str(problem) and len(str(problem)) < 20000, (case, text)
        except AssertionError:
            raise
        except BaseException as error:
            raise AssertionError(f"case {case}: {text!r}") from error
        environment.cache_clear()
