"""The imports between the rooms point one way, as CONTRIBUTING.md says, and no two files import
each other.

What counts as an import is said in ``tools/import_graph.py``. An import for types alone is free
inside a room.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from import_graph import ROOT, Arrow, all_arrows, room

LOW = {"config", "data", "algorithms", "models"}
CORE = LOW | {
    "engines",
    "weights",
    "checkpoint",
    "backends",
    "rollout",
    "observability",
    "utils",
    "cluster",
    "cli",
}
MAY_IMPORT: dict[str, set[str]] = {
    "algorithms": set(),
    # the flag's choices and the checks of an estimator follow from its class
    "config": {"algorithms"},
    "data": {"config", "algorithms"},
    "models": {"data"},
    "observability": {"config", "data"},
    "engines": {"config", "models"},
    "weights": {"config", "data", "models", "engines"},
    "checkpoint": {"data", "observability"},
    "backends": LOW | {"weights", "observability", "checkpoint"},
    "rollout": {"config", "data", "engines", "observability", "utils"},
    "utils": {"config", "data", "engines", "algorithms", "observability"},
    "ray": {"rollout"},  # import paths of older plug-ins
    "cluster": LOW | {"engines", "weights", "checkpoint", "backends", "rollout", "observability"},
    "api": LOW | {"cluster", "observability"},
    "cli": {"config", "cluster", "observability"},
    "agent": {"plugins"},  # documented import paths
    "environments": {"plugins"},  # documented import paths
    "plugins": CORE | {"api"},
}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The sets of modules that reach each other, largest first."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        todo = list(graph[start])
        while todo:
            if (node := todo.pop()) not in seen:
                seen.add(node)
                todo += graph.get(node, ())
        reached[start] = seen
    rings = {
        tuple(sorted(b for b in seen if a in reached.get(b, ())))
        for a, seen in reached.items()
        if a in seen
    }
    return sorted((list(ring) for ring in rings), key=lambda ring: (-len(ring), ring))


def upward(found: tuple[Arrow, ...]) -> list[Arrow]:
    """Arrows between rooms that the table does not allow. Every room may import ``slime.types`` and
    the registry.
    """
    inside = [arrow for arrow in found if room(arrow.module) not in ("slime", "registry")]
    allowed = {name: below | {name, "types", "registry"} for name, below in MAY_IMPORT.items()}
    return [
        arrow
        for arrow in inside
        if room(arrow.target) not in allowed.get(room(arrow.module), set())
    ]


EXCEPTIONS: dict[tuple[str, str], str] = {
    (
        "slime.config.data",
        "slime.rollout.data_source",
    ): "default of --data-source-path, which users read in --help",
    ("slime.config.rollout", "slime.rollout.sglang_rollout"): "default of --rollout-function-path",
    (
        "slime.config.rollout",
        "slime.rollout.fully_async_rollout",
    ): "a value of --rollout-function-path with other checks",
    (
        "slime.config.rollout",
        "slime.rollout.forge_load",
    ): "--rollout-function-path, with --load-forge-rollout-data",
    (
        "slime.config.rollout",
        "slime.rollout.sft_rollout",
    ): "a value of --rollout-function-path with other checks",
    ("slime.engines.embedded.server", "slime.plugins.embedded.server"): "the documented command",
    (
        "slime.backends.megatron_utils.loss",
        "slime.plugins.compat.custom_losses",
    ): "a documented import path",
    (
        "slime.rollout.sglang_rollout",
        "slime.plugins.compat.rollouts",
    ): "a documented import path",
    (
        "slime.utils.external_utils.command_utils",
        "slime.plugins.compat.helpers",
    ): "a documented import path",
    (
        "slime.utils.tensorboard_utils",
        "slime.plugins.compat.helpers",
    ): "a documented import path",
    (
        "slime.ray.rollout",
        "slime.plugins.compat.helpers",
    ): "a documented import path",
    ("slime.utils.misc", "slime.plugins.compat.helpers"): "a documented import path",
    ("slime.rollout.rm_hub.f1", "slime.plugins.rewards.simple"): "a documented import path",
    (
        "slime.rollout.multi_turn",
        "slime.plugins.agents.conversation",
    ): "a documented import path",
    (
        "slime.rollout.sglang_streaming_rollout",
        "slime.plugins.agents.streaming",
    ): "a documented import path",
    ("slime.rollout.rm_hub.encoder", "slime.plugins.rewards.encoder"): "a documented import path",
    ("slime.rollout.rm_hub.gpqa", "slime.plugins.rewards.gpqa"): "a documented import path",
    (
        "slime.rollout.rm_hub.sglang_scorer",
        "slime.plugins.rewards.servers",
    ): "a documented import path",
    (
        "slime.rollout.rm_hub.math_utils",
        "slime.plugins.compat.reward_helpers",
    ): "a documented import path",
    (
        "slime.rollout.rm_hub.math_dapo_utils",
        "slime.plugins.compat.reward_helpers",
    ): "a documented import path",
    (
        "slime.rollout.rm_hub.deepscaler",
        "slime.plugins.compat.reward_helpers",
    ): "a documented import path",
    (
        "slime.plugins.agents.environments",
        "slime.environments.base",
    ): "the name that a message tells users",
}
"""Arrows that lead up, each with the reason."""


def test_each_room_has_its_line() -> None:
    rooms = {p.name for p in ROOT.iterdir() if (p / "__init__.py").is_file()}
    assert rooms == set(MAY_IMPORT), "a new room needs its line here and in CONTRIBUTING.md"


@pytest.mark.parametrize("kind", ["import", "type", "string"])
def test_a_room_uses_only_what_lies_below_it(kind: str) -> None:
    wrong = [
        a for a in upward(all_arrows()) if a.kind == kind and (a.module, a.target) not in EXCEPTIONS
    ]
    assert not wrong, "these lead to a room that MAY_IMPORT does not allow:\n" + "\n".join(
        map(str, wrong)
    )


def test_the_exceptions_are_still_needed() -> None:
    there = {(arrow.module, arrow.target) for arrow in upward(all_arrows())}
    gone = EXCEPTIONS.keys() - there
    assert not gone, f"mended, so take them out of EXCEPTIONS: {sorted(gone)}"


def test_no_two_files_import_each_other() -> None:
    """Directly or through others. An import inside a function counts, one for types alone does
    not.
    """
    graph: dict[str, set[str]] = {}
    for arrow in all_arrows():
        if arrow.kind == "import":
            graph.setdefault(arrow.module, set()).add(arrow.target)
    assert not circles(graph), "\n".join(" <-> ".join(ring) for ring in circles(graph))


def test_no_two_rooms_import_each_other() -> None:
    for low, below in MAY_IMPORT.items():
        assert not [other for other in below if low in MAY_IMPORT[other]], low


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("from slime.high import top", "import"),
        ("def f():\n    from slime.high.top import g", "import"),
        ("from ..high import top", "import"),
        ("import slime.high.top as t", "import"),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from slime.high.top import T",
            "type",
        ),
        ("LOADER = 'slime.high.top.load'", "string"),
        ("COMMAND = ['python', '-m', 'slime.high.top']", "string"),
        ("def f(x):\n    return f'slime.high.top.{x}'", "string"),
    ],
)
def test_every_form_of_import_is_seen(tmp_path: Path, line: str, kind: str) -> None:
    found = _arrows_of_package(tmp_path, {"low/base.py": line, "high/top.py": "import torch\n"})
    assert [(a.module, a.target, a.kind) for a in found] == [
        ("slime.low.base", "slime.high.top", kind)
    ]


def test_prose_and_foreign_modules_are_no_imports(tmp_path: Path) -> None:
    text = (
        '"""See slime.high.top."""\nimport os.path\nNAME = "slime.nothing.here"  # slime.high.top\n'
    )
    assert not _arrows_of_package(tmp_path, {"low/base.py": text, "high/top.py": ""})


def test_a_circle_through_a_function_is_found(tmp_path: Path) -> None:
    found = _arrows_of_package(
        tmp_path,
        {
            "low/a.py": "from slime.low.b import f",
            "low/b.py": "from slime.low import c",
            "low/c.py": "def f():\n    from slime.low.a import g",
            "low/d.py": "from slime.low import a",
        },
    )
    graph: dict[str, set[str]] = {}
    for arrow in found:
        graph.setdefault(arrow.module, set()).add(arrow.target)
    assert circles(graph) == [["slime.low.a", "slime.low.b", "slime.low.c"]]


def _arrows_of_package(tmp_path: Path, files: dict[str, str]) -> tuple[Arrow, ...]:
    for name, text in {
        "__init__.py": "",
        "low/__init__.py": "",
        "high/__init__.py": "",
        **files,
    }.items():
        path = tmp_path / "slime" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return all_arrows(tmp_path / "slime")
