"""The table of names: what registers, what is found, and what a package of somebody else may do
wrong.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from slime import registry
from slime.cli import main
from slime.config.parser import check_args
from slime.registry import RegistryError, find, parts, register
from slime.rollout.rm_hub.reward import reward_of


@pytest.fixture(autouse=True)
def _same_parts_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    parts("reward")  # all have registered
    monkeypatch.setattr(registry, "_parts", dict(registry._parts))
    monkeypatch.setattr(registry, "_failed", list(registry._failed))
    yield
    registry.sections.cache_clear()


def test_every_part_of_slime_is_there() -> None:
    for kind in registry.KINDS:
        for name, part in parts(kind).items():
            if kind != "command":
                assert find(kind, name) is not None, part


def test_an_object_of_a_notebook_can_be_registered_again() -> None:
    for _ in range(2):

        def haiku(sample: object) -> float:
            return 1.0

        register("reward", "haiku", haiku)
    assert find("reward", "haiku") is haiku


def test_two_parts_of_one_name_are_refused() -> None:
    with pytest.raises(RegistryError, match="math"):
        register("reward", "math", "somebody.else:MATH")


@pytest.mark.parametrize(("kind", "name"), [("rewards", "haiku"), ("", "haiku")])
def test_an_unknown_kind_names_the_kinds(kind: str, name: str) -> None:
    with pytest.raises(RegistryError, match="tracker"):
        register(kind, name, "a:b")


def test_an_unknown_name_names_the_parts_that_there_are() -> None:
    with pytest.raises(RegistryError, match="last_number"):
        find("reward", "hiaku")


def test_a_package_that_cannot_register_is_told_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_parts.py").write_text("def parts():\n    raise KeyError('x')\n")
    monkeypatch.syspath_prepend(tmp_path)
    broken = EntryPoint("mine", "broken_parts:parts", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [broken])
    registry._failed.extend(registry._register_others())
    args, _ = check_args(["--rm-type", "math"])
    assert any("broken_parts" in notice and "KeyError" in notice for notice in args.notices)
    with pytest.raises(RegistryError, match="broken_parts"):
        find("reward", "of_mine")


@pytest.mark.parametrize(
    "parts_of_it",
    [
        "register('algorithm', 'mine', 'broken_package.gone:Mine')",
        "register('reward', 'mine', 'broken_package:R', flags='broken_package.gone:Flags')",
        "register('reward', 'mine', 'broken_package:R', flags=int)",
        "register('command', 'mine', 'broken_package:gone')",
    ],
)
def test_what_every_command_line_reads_fails_for_its_package_alone(
    parts_of_it: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_package.py").write_text(
        f"from slime.registry import register\ndef parts():\n    {parts_of_it}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_package", raising=False)
    broken = EntryPoint("mine", "broken_package:parts", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [broken])
    registry._failed.extend(registry._register_others())
    assert not any(name == "mine" for _, name in registry._parts)
    args, problems = check_args(["--rm-type", "math"])
    assert any("broken_package" in notice for notice in args.notices)
    main.build_parser()
    _, problems = check_args(["--rm-type", "mine"])
    assert any("broken_package" in problem for problem in problems), "why the name is unknown"


def test_a_reward_that_is_a_plain_function_is_told() -> None:
    register("reward", "plain", lambda sample: 1.0)
    with pytest.raises(TypeError, match=r"'plain': register Reward\(function\)"):
        reward_of("plain")


def test_import_slime_and_the_flags_load_no_plugin_and_no_torch() -> None:
    """But for the classes of estimators, which the checks of other flags ask, and for the flags of
    plug-ins.
    """
    program = (
        "import sys, slime\n"
        "from slime.config.parser import build_parser\n"
        "build_parser()\n"
        "loaded = [name for name in sys.modules if name.startswith('slime.plugins.') and "
        "name.count('.') > 2]\n"
        "estimators = ('slime.plugins.estimators.', 'slime.plugins.mixture.estimator')\n"
        "loaded = [name for name in loaded if not name.startswith(estimators)]\n"
        "loaded = [name for name in loaded if name.rpartition('.')[2] not in ('config', 'options')]\n"
        "print(*loaded, 'torch' in sys.modules)"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert said.split() == ["False"]


def test_the_delta_transport_is_chosen_by_the_mode_alone() -> None:
    _, problems = check_args(["--update-weight-transport", "delta"])
    assert any("--update-weight-transport" in problem and "disk" in problem for problem in problems)
    args, problems = check_args(["--update-weight-mode", "delta"])
    assert args.update_weight_mode == "delta" and any(
        "needs --update-weight-transport disk" in one for one in problems
    )
