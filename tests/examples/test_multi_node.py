"""The hooks that say where a run's processes are, and the scripts' launch commands."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from example_scripts import CLUSTER, EXAMPLES, LAPTOP, dry_run, load_example, parse
from make_args import make_args

where = load_example("multi_node/where.py")


def test_the_report_has_each_process_with_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: node))
    monkeypatch.setitem(sys.modules, "ray", here)
    args = make_args(output_dir=str(tmp_path), run_name="run", sglang_router_ip="127.0.0.3")
    for step in (1, 0):
        for rank, node in enumerate(("127.0.0.2", "127.0.0.3")):  # noqa: B007 - read by the lambda
            monkeypatch.setenv("RANK", str(rank))
            where.trainer(args, step, {"response_lengths": [3] * (4 + step)})
        assert where.engines(step, args, [object()] * 9, {}, 1.0) is False, (
            "the usual metrics follow"
        )
    assert [line.split() for line in where.report(tmp_path / "run")] == [
        ["engine", "on", "127.0.0.3", "samples", "by", "step:", "[9,", "9]"],
        ["trainer", "rank", "0", "on", "127.0.0.2", "samples", "by", "step:", "[4,", "5]"],
        ["trainer", "rank", "1", "on", "127.0.0.3", "samples", "by", "step:", "[4,", "5]"],
    ]


def test_both_forms_ask_for_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attached, job = dry_run(EXAMPLES / "multi_node" / "run_cpu.sh", tmp_path, datasets=False)
    for command in (attached, job):
        args = parse(command, LAPTOP, monkeypatch)
        assert (args.actor_num_nodes, args.actor_num_gpus_per_node, args.world_size) == (2, 1, 2)
    (command,) = dry_run(EXAMPLES / "multi_node" / "run_gpu.sh", tmp_path, datasets=False)
    args = parse(command, CLUSTER, monkeypatch)
    assert args.world_size + args.rollout_num_gpus == 16
