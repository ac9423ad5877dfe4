"""Other values of flags for one role."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.config.args import Args
from slime.config.settings import check_roles, role_args


def with_file(folder: Path, text: str) -> Args:
    path = folder / "roles.yaml"
    path.write_text(text)
    return Args(megatron_config_path=str(path), world_size=2, train_backend="megatron", lr=1e-6)


def test_a_role_has_its_own_values_and_the_other_none_of_them(tmp_path: Path) -> None:
    args = with_file(
        tmp_path,
        "critic: {lr: 1e-5, num_nodes: 3, recompute_granularity: full, --adam-beta2: 0.9}\n",
    )
    assert check_roles(args) == []
    critic, actor = role_args(args, "critic"), role_args(args, "actor")
    assert (critic.lr, critic.adam_beta2, critic.megatron["recompute_granularity"]) == (
        1e-5,
        0.9,
        "full",
    )
    assert actor.lr == 1e-6 and "recompute_granularity" not in actor.megatron and args.lr == 1e-6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("critics: {lr: 1}", "'critics'"),
        ("critic: {lrr: 1}", "critic: lrr"),
        ("critic: {tensor_model_parallel_size: 2}", "critic has"),
        ("critic: 3", "needs a mapping"),
        ("critic: [", "YAML"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, said: str) -> None:
    assert said in "\n".join(check_roles(with_file(tmp_path, text)))


def test_a_critic_with_gpus_of_its_own_has_another_layout(tmp_path: Path) -> None:
    """And nobody else needs their memory."""
    args = with_file(tmp_path, "critic: {context_parallel_size: 2}\n").with_values(
        use_critic=True, critic_num_nodes=2, critic_num_gpus_per_node=3, offload_train=True,
        train_backend="fsdp", fsdp_shard_size=2,
    )  # fmt: skip
    critic = role_args(args, "critic")
    assert (critic.world_size, critic.offload_train) == (6, False)
    assert check_roles(args) == [] and role_args(args, "actor").world_size == 2
    problem, *_ = check_roles(args.with_values(critic_num_nodes=1))
    assert problem.startswith("the critic: 3 training ranks are not a multiple of")
    (problem,) = check_roles(args.with_values(fsdp_shard_size=4))
    assert problem.startswith("the critic: --fsdp-shard-size 4 does not divide the 6")
    (problem,) = check_roles(args.with_values(fsdp_expert_parallel_size=4))
    assert problem.startswith("the critic: --fsdp-expert-parallel-size 4 does not divide the 2")


def test_without_a_file_both_roles_have_the_run_s() -> None:
    args = Args()
    assert role_args(args, "critic") is args and check_roles(args) == []
