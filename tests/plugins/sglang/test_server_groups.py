"""--sglang-config and --prefill-num-servers: from the file to the list of servers."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from make_args import make_args, rule_problems

from slime.config.cluster import check_machine
from slime.config.engine import ServerGroupError, check_server_groups
from slime.config.machine import Machine
from slime.config.rules import Run, idle_flags
from slime.engines.launch import engine_count, plan_engines
from slime.plugins.sglang.options import read_server_groups
from slime.rollout.state import concurrency

TWO_MODELS = """
sglang:
  - name: actor
    num_gpus_per_engine: 2
    server_groups:
      - {worker_type: prefill, num_gpus: 2}
      - {worker_type: placeholder, num_gpus: 1}
      - {worker_type: decode, num_gpus: 4, overrides: {mem-fraction-static: 0.8}}
  - name: judge
    model_path: /models/judge
    engine_groups:
      - {num_gpus: 1}
"""


def write(folder: Path, text: str) -> str:
    file = folder / "groups.yaml"
    file.write_text(dedent(text))
    return str(file)


def test_servers_of_two_models_with_a_hole_between_them(tmp_path: Path) -> None:
    args = make_args(
        hf_checkpoint="/models/actor",
        rollout_backend="sglang",
        sglang_config=write(tmp_path, TWO_MODELS),
    )
    assert args.rollout_num_gpus == 8
    specs = plan_engines(args)
    assert [(s.index, s.model, s.worker_type, s.slot, s.num_gpus, s.updates) for s in specs] == [
        (0, "actor", "prefill", 0, 2, True),
        (1, "actor", "decode", 3, 2, True),
        (2, "actor", "decode", 5, 2, True),
        (3, "judge", "regular", 7, 1, False),
    ]
    assert [s.model_path for s in specs] == ["/models/actor"] * 3 + ["/models/judge"]
    assert [s.options for s in specs] == [{}, *[{"mem_fraction_static": 0.8}] * 2, {}]
    assert concurrency(args, engine_count(args)) == 2 * 512  # what decodes for the trained model
    assert [*check_server_groups(args), *rule_problems(args)] == []


def test_one_model_without_a_file() -> None:
    args = make_args(
        hf_checkpoint="m", rollout_backend="sglang", rollout_num_gpus=8, rollout_num_gpus_per_engine=2,
        prefill_num_servers=1,
    )  # fmt: skip
    kinds = [(s.worker_type, s.slot, s.model) for s in plan_engines(args)]
    assert kinds == [
        ("prefill", 0, "default"),
        *[("decode", slot, "default") for slot in (2, 4, 6)],
    ]
    assert concurrency(args, engine_count(args)) == 3 * 512
    args.prefill_num_servers = None
    assert [s.worker_type for s in plan_engines(args)] == ["regular"] * 4
    args.rollout_external_engine_addrs = ["a:1", "b:2", "c:3"]
    assert plan_engines(args) == [] and concurrency(args, engine_count(args)) == 3 * 512


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("other: 1", "'sglang'"),
        ("sglang: [{name: a}]", r"sglang\[0\]: .* is not valid"),
        ("sglang: [{server_groups: [{num_gpus: 1}]}]", "'name' is a required property"),
        ("sglang: [{name: a, server_grups: []}]", "'server_grups' was unexpected"),
        ("sglang: [{name: a, server_groups: [{num_gpu: 1}]}]", "'num_gpus' is a required"),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 0}]}]",
            r"server_groups\[0\]\.num_gpus: 0 is less than",
        ),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 3, num_gpus_per_engine: 2}]}]",
            "not a multiple",
        ),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1, worker_type: decoder}]}]",
            "'regular', 'prefill'",
        ),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1, worker_type: encoder}]}]",
            "'encoder' is not one of",
        ),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1, worker_type: decode}]}]",
            "only regular",
        ),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1, worker_type: placeholder}]}]",
            "only placeholders",
        ),
        ("sglang: [{name: a, server_groups: [{num_gpus: 1, overrides: [x]}]}]", "object"),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1, overrides: {api-key: x}}]}]",
            "api_key",
        ),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1, overrides: {context-length: 4k}}]}]",
            "context-length",
        ),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1}]}, {name: a, server_groups: "
            "[{num_gpus: 1}]}]",
            "name 'a'",
        ),
        (
            "sglang: [{name: a, model_path: /other, server_groups: [{num_gpus: 1}]}]",
            "the trainer's",
        ),
        ("sglang: [", "YAML"),
    ],
)
def test_what_is_wrong_in_the_file_is_said_where(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ServerGroupError, match=says):
        read_server_groups(write(tmp_path, text), "/models/actor", 1)


def test_flags_that_do_not_go_together(tmp_path: Path) -> None:
    file = write(tmp_path, "sglang: [{name: a, server_groups: [{num_gpus: 2}]}]")
    given = {"hf_checkpoint": "m", "rollout_backend": "sglang", "sglang_config": file}

    def problems(**more: object) -> str:
        return "\n".join(check_server_groups(make_args(**{**given, **more})))

    assert problems() == ""
    assert "2 GPUs, but --rollout-num-gpus is 4" in problems(rollout_num_gpus=4)
    assert "No such file" in problems(sglang_config=str(tmp_path / "none.yaml"))
    assert "must decode" in problems(sglang_config=None, prefill_num_servers=2, rollout_num_gpus=2)


def test_what_sglang_on_a_cpu_does_not_do_is_said() -> None:
    cpu, gpu = Machine(0, 2, False), Machine(1, 2, False)
    args = make_args(
        hf_checkpoint="m", rollout_backend="sglang", deterministic=True, embedded_max_total_tokens=9
    )
    (problem,) = rule_problems(args, machine=cpu)
    assert "--deterministic" in problem and rule_problems(args, machine=gpu) == []
    assert "--embedded-max-total-tokens 9" in dict(idle_flags(Run(args, False, gpu)))


ON_GPU, ON_CPU = (
    Machine(gpus=8, cores=8, in_cluster=False),
    Machine(gpus=0, cores=8, in_cluster=False),
)


def colocated(
    machine: Machine = ON_GPU, train: int = 2, rollout: int = 4, **more: Any
) -> list[str]:
    given: dict[str, Any] = {
        "hf_checkpoint": "model", "rollout_backend": "sglang", "colocate": True, "actor_num_gpus_per_node": train,
        "rollout_num_gpus": rollout, "rollout_num_gpus_per_engine": 2,
    }  # fmt: skip
    args = make_args(**{**given, **more})
    problems = [*rule_problems(args, machine=machine), *check_machine(Run(args, machine=machine))]
    return [problem for problem in problems if problem.startswith("--colocate with")]


def test_colocated_servers_on_gpus_without_a_training_rank_are_refused() -> None:
    assert "training rank" in colocated()[0]
    assert (
        colocated(train=4)
        == colocated(rollout=2)
        == colocated(update_weight_transport="disk")
        == []
    )
    assert (
        colocated(colocate=False) == colocated(ON_CPU) == colocated(debug_rollout_only=True) == []
    )


def test_colocated_servers_that_get_no_weights_may_be_anywhere(tmp_path: Path) -> None:
    file = tmp_path / "groups.yaml"
    frozen = (
        "{name: judge, model_path: other, server_groups: [{worker_type: regular, num_gpus: 2}]}"
    )
    ours = "{name: actor, server_groups: [{worker_type: regular, num_gpus: 2}]}"
    file.write_text(f"sglang: [{ours}, {frozen}]")
    assert colocated(sglang_config=str(file)) == []
    file.write_text(f"sglang: [{frozen}, {ours}]")
    assert len(colocated(sglang_config=str(file))) == 1


def test_colocated_servers_with_pipeline_stages_are_refused() -> None:
    assert "pipeline stages" in colocated(train=4, sglang={"pp_size": 2})[0]
    assert colocated(train=4, sglang={"pp_size": 2}, update_weight_transport="disk") == []
