"""``--recipe``: it sets the flags of its row, prints them, and gives way to flags of the user."""

from __future__ import annotations

import pytest

from slime.config.args import FLAGS
from slime.config.resolve import validate
from slime.config.rules import Run
from slime.plugins.estimators import recipes, values_of
from tests.make_args import CPU_MACHINE, make_args
from tools.flags_page import recipes_table


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_sets_and_prints_its_flags(name: str) -> None:
    args = make_args(recipe=name)
    values = values_of(recipes()[name], vars(args))
    assert {one: getattr(args, one) for one in values} == values
    plain = make_args()
    assert any(getattr(plain, one) != value for one, value in values.items())
    (notice,) = [line for line in args.notices if line.startswith(f"--recipe {name} ")]
    assert all(FLAGS[one].option in notice for one in values)
    assert not [line for line in validate(Run(args, machine=CPU_MACHINE)) if "estimator" in line]


def test_a_flag_of_the_user_wins() -> None:
    args = make_args(recipe="dapo", eps_clip_high=0.5, rollout_max_response_len=200)
    assert (args.eps_clip_high, args.overlong_buffer_len) == (0.5, 40)
    assert args.calculate_per_token_loss
    (notice,) = [line for line in args.notices if line.startswith("--recipe dapo")]
    assert notice.index("as you gave them: --eps-clip-high") > 0


def test_the_class_of_the_estimator_follows() -> None:
    """Derivations that read the estimator come after the recipe."""
    assert make_args(recipe="gspo").advantage_estimator == "gspo"
    assert make_args(recipe="dppo").use_tis is False, "the engine's log-probs are the old ones"
    said = make_args(recipe="gspo", eps_clip=0.2, eps_clip_high=0.2)
    validate(Run(said, machine=CPU_MACHINE))
    assert any("3e-4" in line for line in said.notices), "the notice of a clip that is PPO's"


def test_every_recipe_is_in_the_table_of_the_docs() -> None:
    assert all(f"| `{name}` |" in recipes_table() for name in recipes())
