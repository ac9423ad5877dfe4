"""Limits of what ``tools/measure_code.py`` counts in the package. They are lowered when it shrinks.

Only a capability that an issue names may raise the tokens of its room; a new one is a plug-in, with
a row of its own.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {
    "files_above_400_lines": 48,
    "functions_above_60_lines": 3,
    "getattr_of_args_with_default": 0,
    "attributes_any_none": 0,
    "any_parameter_percent": 0.5,
    "functions_that_take_args": 177,
    "own_functions_that_take_args": 86,
    "files": 560,
}

TOKENS = {
    "agent": 116,
    "algorithms": 7_206,
    "api": 10_393,
    "backends": 42_640,
    "checkpoint": 8_278,
    "cli": 682,
    "cluster": 33_980,
    "config": 29_306,
    "data": 38_386,
    "engines": 14_766,
    "environments": 43,
    "models": 38_879,
    "observability": 15_706,
    "ray": 25,
    "rollout": 30_978,
    "utils": 952,
    "weights": 19_162,
    "plugins/agents": 48_193,
    "plugins/compat": 11_685,
    "plugins/delta": 6_720,
    "plugins/distillation": 3_976,
    "plugins/embedded": 40_170,
    "plugins/estimators": 6_195,
    "plugins/http": 1_880,
    "plugins/launch": 2_015,
    "plugins/mixture": 4_918,
    "plugins/named_data": 1_431,
    "plugins/preference": 3_434,
    "plugins/quantized": 3_512,
    "plugins/rewards": 20_757,
    "plugins/serve": 16_434,
    "plugins/sglang": 5_859,
    "plugins/tools": 100_351,
    "plugins/trackers": 2_164,
    "plugins/vllm": 7_004,
    "plugins/workers": 2_887,
    "plugins/megatron": 48_211,
    "plugins/muon": 1_555,
    "plugins/gap": 7_653,
    "plugins/actors": 5_237,
    "plugins/restarts": 3_264,
    "plugins/true_on_policy": 7_614,
}
"""The most tokens of each room and plug-in."""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "measure_code", ROOT / "tools" / "measure_code.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_package_stays_within_its_limits(tool: ModuleType) -> None:
    found = tool.show(ROOT / "slime")
    above = {name: (found[name], limit) for name, limit in LIMITS.items() if found[name] > limit}
    assert not above, f"counted, limit: {above}"


def test_no_room_grows(tool: ModuleType) -> None:
    found = tool.tokens_by_room()
    assert found.keys() == TOKENS.keys(), "a new plug-in needs a row here"
    above = {
        room: (tokens, TOKENS[room]) for room, tokens in found.items() if tokens > TOKENS[room]
    }
    assert not above, f"counted, limit: {above}"


def test_what_is_counted(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""A docstring\nof two lines."""\n\nfrom typing import Any\n\n# a comment\n'
        "class A:\n    x: Any = None  # at the end of a line\n\n"
        '    def f(self, args: Any) -> int:\n        """Documented."""\n        return getattr(self.args, "n", 1)\n\n'
        '    def g(self, n: int) -> int:\n        return getattr(self.args, "n") + n\n'
    )
    found = tool.show(tmp_path)
    assert (found["code_lines"], found["comment_lines"], found["total_lines"]) == (7, 1, 15)
    assert found["tokens"] == 58
    assert (
        found["functions"],
        found["functions_with_any_parameter"],
        found["functions_that_take_args"],
    ) == (2, 1, 1)
    assert (found["getattr_of_args_with_default"], found["attributes_any_none"]) == (1, 1)
    assert found["any_parameter_percent"] == 50.0


def test_whose_choice_it_is_to_take_args(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "plugins" / "compat").mkdir(parents=True)
    (tmp_path / "plugins" / "compat" / "a.py").write_text("def older(args: Args): ...\n")
    (tmp_path / "misc.py").write_text(
        "def score(args: Args, sample, evaluation=False): ...\n"
        "def _score(args: Args, sample): ...\n"
        "def cut(args: Args, sample, length): ...\n"
    )
    (tmp_path / "config.py").write_text("def resolve(args: Args): ...\n")  # a registered name
    found = tool.show(tmp_path)
    assert found["functions_that_take_args"] == 5
    assert found["own_functions_that_take_args"] == 2
