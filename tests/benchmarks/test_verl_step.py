"""The parts of the comparison with verl that need neither verl nor a GPU."""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import given_lengths
import verl_step

from slime.config.parser import check_args


def parse(tmp_path: Path, *words: str) -> argparse.Namespace:
    args = verl_step.parse_args(["--output-dir", str(tmp_path), *words])
    (args.model).mkdir()
    (args.model / "config.json").write_text('{"model_type": "qwen3"}')
    args.rows.write_text('{"prompt": "How many?", "label": "0"}\n')
    return args


def settings(command: list[str]) -> dict[str, str]:
    """Of verl's command line, without Hydra's mark of a new setting."""
    return dict(word.lstrip("+").split("=", 1) for word in command[3:])


@pytest.mark.parametrize("more", [[], ["--offload", "--recompute"], ["--device", "cpu"]])
def test_both_commands_ask_for_the_same_work(tmp_path: Path, more: list[str]) -> None:
    words = [
        "--prompts",
        "4",
        "--group-size",
        "2",
        "--lengths",
        "log-normal:32:256",
        "--engine-memory",
        "0.5",
        *more,
    ]
    args = parse(
        tmp_path,
        *words,
        "--our-flags=--lr 2e-6",
        "--verl-set",
        "actor_rollout_ref.actor.optim.lr=2e-6",
    )
    verl = settings(verl_step.verl_command(args))
    command = verl_step.our_command(args)
    ours, problems = check_args(command[2:])
    assert not [
        problem
        for problem in problems
        if "--rollout-backend sglang: it is not installed" not in str(problem)
    ]
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    assert command[1].endswith("/train.py") and Path(command[1]).is_file()
    pairs = {
        "data.train_batch_size": ours.rollout_batch_size,
        f"{rollout}.n": ours.n_samples_per_prompt,
        "data.max_response_length": ours.rollout_max_response_len,
        "trainer.total_training_steps": ours.num_rollout,
        f"{actor}.ppo_max_token_len_per_gpu": ours.max_tokens_per_gpu,
        f"{rollout}.log_prob_max_token_len_per_gpu": ours.max_tokens_per_gpu,
        f"{actor}.ppo_mini_batch_size": ours.global_batch_size // ours.n_samples_per_prompt,
        f"{actor}.optim.lr": ours.lr,
        f"{actor}.fsdp_config.param_offload": ours.offload_train,
        f"{actor}.fsdp_config.optimizer_offload": ours.offload_train,
        "actor_rollout_ref.model.enable_gradient_checkpointing": ours.gradient_checkpointing,
        "algorithm.adv_estimator": ours.advantage_estimator,
        f"{actor}.use_kl_loss": ours.use_kl_loss,
        f"{actor}.entropy_coeff": ours.entropy_coef,
        "data.shuffle": ours.rollout_shuffle,
    }
    assert {name: type(value)(verl[name]) if not isinstance(value, bool) else verl[name] == "True" for name, value in
            pairs.items()} == pairs  # fmt: skip
    assert not ours.skip_zero_advantage_groups and ours.colocate
    if args.device == "cuda":
        engine = f"{rollout}.engine_kwargs.sglang"
        assert (
            float(verl[f"{rollout}.gpu_memory_utilization"])
            == ours.sglang_mem_fraction_static
            == 0.5
        )
        assert verl[f"{engine}.attention_backend"] == ours.sglang_attention_backend
        assert (
            int(verl[f"{engine}.cuda_graph_max_bs_decode"])
            == ours.sglang_cuda_graph_max_bs_decode
            == 8
        )
    for file in ("reward.custom_reward_function.path", "data.train_files"):
        assert Path(verl[file]).suffix == (".py" if "reward" in file else ".parquet")
    assert Path(verl["reward.custom_reward_function.path"]).is_file()


def test_tuned_changes_what_an_expert_would_set_for_verl(tmp_path: Path) -> None:
    """Nothing of the work changes apart from the pass for old log-probs, and nothing of slime's
    command.
    """
    args = parse(tmp_path)
    plain, ours = settings(verl_step.verl_command(args)), verl_step.our_command(args)
    tuned_args = verl_step.parse_args(["--output-dir", str(tmp_path), "--tuned"])
    tuned = settings(verl_step.verl_command(tuned_args))
    sampler, fsdp = "trainer.v1.sampler.custom_sampler", "actor_rollout_ref.actor.fsdp_config"
    hooks = tuned.pop(f"{sampler}.path")
    assert dict(tuned.items() - plain.items()) == {
        "algorithm.rollout_correction.bypass_mode": "True",
        f"{fsdp}.reshard_after_forward": "False",
        f"{fsdp}.use_no_sync_for_gradient_accumulation": "True",
        "actor_rollout_ref.rollout.agent.num_workers": "8",
        f"{sampler}.name": "QuickSampler",
    }
    assert plain.keys() <= tuned.keys() and verl_step.our_command(tuned_args) == ours
    classes = [
        node for node in ast.parse(Path(hooks).read_text()).body if isinstance(node, ast.ClassDef)
    ]
    assert tuned[f"{sampler}.name"] in [node.name for node in classes]
    told = verl_step.report(tuned_args, {})
    assert told["tuned"] and told["bypass"]


def test_both_sides_draw_the_same_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse(tmp_path, "--lengths", "log-normal:512:4096")
    drawn = []
    for side in ("verl", "ours"):
        monkeypatch.setenv(
            given_lengths.LENGTHS, verl_step.environment(args, side)[given_lengths.LENGTHS]
        )
        drawn.append([given_lengths.limits(number)["max_new_tokens"] for number in range(2000)])
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 500
    assert 470 < statistics.median(drawn[0]) < 560 and max(drawn[0]) == 4096 == args.longest
    monkeypatch.setenv(given_lengths.LENGTHS, "1024")
    assert given_lengths.limits(7) == {"max_new_tokens": 1024, "ignore_eos": True}
    for wrong in ("long", "log-normal:512", "0", "normal:1:2", "1:2"):
        with pytest.raises(SystemExit):
            verl_step.parse_args(["--lengths", wrong])


def test_the_questions_are_the_same_in_both_files(tmp_path: Path) -> None:
    import pyarrow.parquet

    args = parse(tmp_path, "--prompts", "3", "--steps", "2")
    verl_step.write_questions(args)
    table = pyarrow.parquet.read_table(args.table).to_pylist()
    ours = [json.loads(line)["prompt"] for line in args.rows.read_text().splitlines()]
    assert [row["prompt"] for row in table] == [
        [{"role": "user", "content": text}] for text in ours
    ]
    assert [row["extra_info"]["index"] for row in table] == list(range(9)) and len(set(ours)) == 9


def rows_of_both(args: argparse.Namespace) -> None:
    """Logs in the form of the two: a first step that compiles, then three; verl counts from 1."""
    verl = [
        {"timing_s/step": s, "timing_s/gen": s / 2, "timing_s/old_log_prob": 5.0, "response_length/mean": 1024.0,
         "timing_s/update_actor": 8.0, "critic/score/mean": 0.5}
        for s in (200.0, 28.0, 27.0, 30.0)
    ]  # fmt: skip
    lines = [json.dumps({"step": number + 1, "data": row}) for number, row in enumerate(verl)]
    verl_step.metrics_file(args, "verl").write_text("\n".join(reversed(lines)))
    ours = [
        {
            "rollout/step": number,
            "perf/step_time": s,
            "perf/rollout_time": s - 4,
            "rollout/response_len/mean": 1024.0,
        }
        for number, s in enumerate((150.0, 16.0, 14.0, 13.0))
    ]
    verl_step.metrics_file(args, "ours").parent.mkdir(exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in ours)
    verl_step.metrics_file(args, "ours").write_text(
        text + json.dumps({"eval/step": 3, "perf/eval_time": 1.0}) + "\n"
    )


def test_figures_are_those_of_the_counted_steps(tmp_path: Path) -> None:
    args = parse(tmp_path)
    rows_of_both(args)
    results: dict[str, Any] = {}
    for side, gib in (("verl", 91.0), ("ours", 130.0)):
        results[side] = verl_step.figures(side, verl_step.read_rows(args, side), 1) | {
            "peak_gib": gib
        }
    assert (
        results["verl"]["steps"]["step"] == [28.0, 27.0, 30.0]
        and results["verl"]["medians"]["training"] == 8.0
    )
    assert results["ours"]["medians"] == {
        "step": 14.0,
        "generation": 10.0,
        "response_tokens": 1024.0,
    }
    made = verl_step.report(args, results)
    assert (
        made["ratio"] == 2.0
        and made["ratio_without_old_log_probs"] == round(23 / 14, 2)
        and made["same_tokens"]
    )
    results["ours"]["medians"]["response_tokens"] = 900.0
    assert not verl_step.report(args, results)["same_tokens"]
    results["ours"] = verl_step.figures("ours", [], 1) | {"peak_gib": None}
    assert "ratio" not in verl_step.report(args, results) and "0 steps" in results["ours"]["failed"]


def newest_rows() -> dict[str, dict[str, Any]]:
    """The newest measurement of each shape, by its name; it has both sides."""
    file = verl_step.HERE / "results" / "h200_verl_step_december_1.jsonl"
    rows = map(json.loads, file.read_text().splitlines())
    return {row["name"]: row for row in rows}


def test_the_pages_have_the_ratios_of_the_newest_medians() -> None:
    pages = ("README.md", "docs/en/performance.md", "benchmarks/README.md")
    for name, row in newest_rows().items():
        ratio = f"**{row['verl']['medians']['step'] / row['ours']['medians']['step']:.2f}**"
        assert all(ratio in (verl_step.HERE.parent / page).read_text() for page in pages), (
            name,
            ratio,
        )


def test_a_side_that_fails_costs_the_other_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole script, with two small programs in the place of the two trainers: one hangs, the
    other works.
    """
    hangs = (
        "import pathlib, subprocess, time; child = subprocess.Popen(['sleep', '600']); "
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid)); time.sleep(600)"
    )
    row = json.dumps({"rollout/step": 1, "perf/step_time": 3.0, "rollout/response_len/mean": 2.0})
    works = (
        "import pathlib; p = pathlib.Path('ours'); p.mkdir(); (p / "
        f"'metrics.jsonl').write_text({row!r})"
    )
    monkeypatch.setattr(verl_step, "verl_command", lambda args: [sys.executable, "-c", hangs])
    monkeypatch.setattr(verl_step, "our_command", lambda args: [sys.executable, "-c", works])
    words = [
        "--shape",
        "tiny",
        "--device",
        "cpu",
        "--warmup",
        "0",
        "--seconds",
        "2",
        "--output-dir",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", ["verl_step.py", *words])
    assert verl_step.main() == 1
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert made["ours"]["medians"]["step"] == 3.0 and "failed" not in made["ours"]
    assert "status -15" in made["verl"]["failed"] and "ratio" not in made
    child = int((tmp_path / "pid").read_text())
    assert (
        not Path(f"/proc/{child}").exists()
        or "Z" in Path(f"/proc/{child}/stat").read_text().split(")")[1]
    )


def test_the_page_has_tokens_of_an_hour_and_energy_of_the_results() -> None:
    page = verl_step.HERE.parent / "docs" / "en" / "performance.md"
    cost = page.read_text().partition("## Cost")[2]
    for name, row in newest_rows().items():
        for side in ("verl", "ours"):
            medians = row[side]["medians"]
            millions = row["prompts"] * row["group_size"] * medians["response_tokens"] / 1e6
            shown = f"{millions / medians['step'] * 3600:.1f}"
            assert (f"**{shown}**" if side == "ours" else f"| {shown} |") in cost, name
            shown = f"{row[side]['kilojoules']['median'] / millions:.1f}"
            assert (f", **{shown}** |" if side == "ours" else f"| {shown}, ") in cost, name
