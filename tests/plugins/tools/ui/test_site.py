"""Each value that the page asks for, from the files of a real run."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pytest

from slime.observability.files import replacing
from slime.observability.run_state import RunState
from slime.observability.samples import read_samples
from slime.plugins.tools.ui import NotFound, answer, as_json, path_of
from slime.plugins.tools.ui.runs import NoRuns, Run, Runs
from slime.plugins.tools.ui.tokens import NO_DUMP, NO_TRAINER, pieces


def ask(runs: Runs, *parts: object) -> Any:
    value = answer(runs, path_of("run", "tiny", *parts))
    return json.loads(orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS))


def set_state(folder: Path, **values: object) -> None:
    state = {
        **asdict(RunState("running", os.getpid(), socket.gethostname(), "train", time.time())),
        **values,
    }
    (folder / "state.json").write_text(json.dumps(state))


def test_the_list_of_runs(runs: Runs) -> None:
    (one,) = json.loads(orjson.dumps(answer(runs, "/api/runs")))["runs"]
    assert (one["key"], one["status"], one["steps"], one["planned"], one["pending"]) == (
        "tiny",
        "completed",
        4,
        4,
        0,
    )


def test_the_models_of_a_server(runs: Runs, folder: Path) -> None:
    assert ask(runs, "overview")["served"] == []
    models = [{"tenant": "alice", "session": "a", "model": "a:train:0", "rank": 8}]
    (folder / "served.json").write_text(json.dumps(models))
    assert ask(runs, "overview")["served"] == models


def test_the_overview(runs: Runs, folder: Path) -> None:
    values = ask(runs, "overview")
    assert (
        "rollout/raw_reward" in values["names"] and values["settings"]["n_samples_per_prompt"] == 4
    )
    assert values["samples"] == 4 * 8 + 2 * 8 and values["evaluations"] == ["products"]
    assert {entry["what"]: entry["there"] for entry in values["recorded"]} == dict.fromkeys(
        ("texts of samples", "traces", "tokens", "evaluations", "ledger", "state"), True
    )


def test_the_settings_of_a_resume_replace_those_before(runs: Runs, folder: Path) -> None:
    assert ask(runs, "overview")["planned"] == 4
    config = folder / "config.yaml"
    with replacing(config) as temporary:
        temporary.write_text(
            config.read_text()
            .replace("\nnum_rollout: 4", "\nnum_rollout: 8")
            .replace("\nlr: 1.0e-05", "\nlr: 0.5")
        )
    runs.refresh()
    found = ask(runs, "overview")
    assert (found["planned"], found["settings"]["lr"]) == (8, 0.5)


def test_the_status_of_a_driver_that_is_gone(runs: Runs, folder: Path) -> None:
    set_state(folder)
    assert ask(runs, "overview")["status"] == "running"
    set_state(folder, since=1.0)  # this process is younger, so it is another one
    assert ask(runs, "overview")["status"] == "dead"
    set_state(folder, host="elsewhere")
    assert ask(runs, "overview")["status"] == "remote"
    (folder / "state.json").unlink()
    assert ask(runs, "overview")["status"] == "unknown"


def test_a_wait_in_progress_has_its_name(runs: Runs, folder: Path) -> None:
    said = {"rollout-manager": {"phase": "generate", "done": 3, "total": 8, "since": 5.0}}
    set_state(
        folder, waiting="rollout 3 to be generated", waiting_since=4.0, deadline=60.0, said=said
    )
    waiting = ask(runs, "overview")["waiting"]
    assert (waiting["what"], waiting["deadline"]) == ("rollout 3 to be generated", 60.0)
    assert waiting["said"] == [{"name": "rollout-manager", **said["rollout-manager"]}]


def test_the_findings_of_the_doctor(runs: Runs, folder: Path) -> None:
    set_state(folder, status="failed", error="OSError: [Errno 28] No space left on device")
    assert ask(runs, "doctor")["findings"][0]["kind"] == "disk_full"


def test_a_curve(runs: Runs) -> None:
    curve = ask(runs, "series", "rollout/raw_reward")
    assert (
        curve["steps"] == [0, 1, 2, 3]
        and len(curve["values"]) == 4
        and curve["times"] == sorted(curve["times"])
    )


def test_the_groups_of_a_step(runs: Runs, folder: Path) -> None:
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    for number in range(4):
        values = ask(runs, "step", number)
        texts = read_samples(folder / "samples" / f"rollout_{number:06d}.jsonl")
        kept = [group for group in values["groups"] if group["samples"]]
        assert [group["group"] for group in kept] == list(
            dict.fromkeys(text["group_index"] for text in texts)
        )
        for group in kept:
            mine = [text for text in texts if text["group_index"] == group["group"]]
            assert group["reward"] == pytest.approx(sum(text["reward"] for text in mine) / 4)
            assert group["statuses"] == dict(Counter(text["status"] for text in mine))
            assert group["state"] == "trained" and group["n"] == 4
            assert group["staleness"] == max(
                number - int(text["weight_versions"][0].split(".")[1]) for text in mine
            )
        dropped = {g["group"]: g["reason"] for g in values["groups"] if g["state"] == "filtered"}
        assert dropped == {
            r["group"]: r["reason"]
            for r in ledger
            if r.get("state") == "filtered" and r["rollout"] == number
        }
    assert ask(runs, "steps")["steps"] == [0, 1, 2, 3]


def test_a_time_line_says_who_waited_for_whom(runs: Runs) -> None:
    values = ask(runs, "timeline", 1)
    assert "train" in [name for name, _, _ in values["phases"]]
    assert len(values["groups"]) == 2 and all(
        len(group["samples"]) == 4 for group in values["groups"]
    )
    assert max(values["active"]) == 8
    assert values["notes"][0].startswith("Half of the 8 samples were ready after")
    assert "step 99" in ask(runs, "timeline", 99)["missing"]


def test_a_damaged_trace_is_not_said_to_be_missing(runs: Runs, run: Run, folder: Path) -> None:
    run.settings = {"log_keep_last": 4}
    path = folder / "traces" / "rollout_000001.json.gz"
    path.write_bytes(path.read_bytes()[:100])
    assert (
        ask(runs, "timeline", 1)["missing"]
        == f"{path} cannot be drawn: it is damaged, or has no spans."
    )


def test_a_sample_with_its_siblings(runs: Runs, folder: Path) -> None:
    values = ask(runs, "sample", "rollout", 2, 5)
    assert values["record"] == read_samples(folder / "samples" / "rollout_000002.jsonl")[5]
    assert values["siblings"] == [4, 5, 6, 7] and values["ledger"]["state"] == "trained"
    assert ask(runs, "sample", "eval-products", 0, 0)["ledger"] is None


def test_the_tokens_of_a_sample(runs: Runs, run: Run) -> None:
    record = ask(runs, "sample", "rollout", 2, 5)["record"]
    values = ask(runs, "tokens", 2, record["index"])
    length = record["response_length"]
    assert len(values["ids"]) - values["prompt"] == length
    assert {name: len(column) for name, column in values["columns"].items()} == dict.fromkeys(
        values["columns"], length
    )
    assert {"log_probs", "rollout_log_probs", "advantages", "loss_masks"} <= values[
        "columns"
    ].keys()
    assert values["meanings"].keys() == values["columns"].keys()
    # The tokens of this step are a step older than the weights that were trained, so both sides
    # differ.
    gaps = [
        a - b
        for a, b in zip(
            values["columns"]["log_probs"], values["columns"]["rollout_log_probs"], strict=True
        )
    ]
    assert 1e-4 < max(map(abs, gaps)) < 5


def test_what_was_not_recorded_is_said(runs: Runs, run: Run, folder: Path) -> None:
    index = ask(runs, "sample", "rollout", 2, 0)["record"]["index"]
    (folder / "details" / "train_data" / "2.pt").unlink()
    values = ask(runs, "tokens", 2, index)  # the other dump still has the engine's side
    assert "--save-debug-train-data" in values["notes"][0] and "log_probs" not in values["columns"]
    assert "rollout_log_probs" in values["columns"]
    (folder / "details" / "rollout_data" / "2.pt").unlink()
    assert "config.yaml" in ask(runs, "tokens", 2, index)["notes"][0]
    run.tokens.settings = {}
    assert ask(runs, "tokens", 2, index)["notes"] == [NO_DUMP]


def test_tokens_of_the_engines_alone_are_recorded(runs: Runs, run: Run) -> None:
    index = ask(runs, "sample", "rollout", 2, 0)["record"]["index"]
    run.settings = {
        name: value for name, value in run.settings.items() if name != "save_debug_train_data"
    }
    run.tokens.settings = run.settings
    assert ask(runs, "tokens", 2, index)["ids"]
    recorded = {entry["what"]: entry["there"] for entry in ask(runs, "overview")["recorded"]}
    assert recorded["tokens"]


def test_a_dump_without_the_trainers_log_probs_names_the_flag(
    runs: Runs, run: Run, folder: Path
) -> None:
    import torch

    path = folder / "details" / "train_data" / "1.pt"
    dump = torch.load(path, weights_only=False)
    for sample in dump["samples"]:
        del sample["log_probs"]
    torch.save(dump, path)
    assert NO_TRAINER in ask(runs, "tokens", 1, dump["samples"][0]["sample_indices"])["notes"]


class Bytes:
    """A decoder with one token per byte of UTF-8."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize("text", ["plain", "naïve 🦙 ok", "日本語", "", "a\ufffdb"])
def test_pieces_join_to_the_text(text: str) -> None:
    texts = pieces(Bytes(), list(text.encode()))
    assert "".join(texts) == text and len(texts) == len(text.encode())


def test_values_that_orjson_refuses_become_json() -> None:
    value = {"text": "\ud83d", "wide": 2**70, "nan": float("nan")}
    assert orjson.loads(as_json({"text": "ä", "nan": float("nan")})) == {"text": "ä", "nan": None}
    assert json.loads(as_json(value)) == {"text": "?", "wide": 2**70, "nan": None}


def test_a_prompt_over_the_run(runs: Runs, folder: Path) -> None:
    listed = ask(runs, "prompts")
    assert (
        listed["total"] == len(listed["prompts"]) and sum(p["n"] for p in listed["prompts"]) == 32
    )
    first = listed["prompts"][0]
    values = ask(runs, "prompt", first["key"])
    assert (
        values["head"] == first["head"]
        and len([r for r in values["samples"] if r["kind"] == "rollout"]) == first["n"]
    )
    row = values["samples"][0]
    text = read_samples(folder / "samples" / f"{row['kind']}_{row['step']:06d}.jsonl")[
        row["position"]
    ]["response"]
    assert row["response"] == " ".join(text.split())


def test_two_evaluations_side_by_side(runs: Runs, folder: Path) -> None:
    values = ask(runs, "evaluations")
    assert values["texts"] == {"products": [0, 4]} and [
        e["step"] for e in values["sets"]["products"]
    ] == [0, 4]
    rows = ask(runs, "evaluation", "products", 0, 4)["rows"]
    recorded = json.loads((folder / "eval" / "eval_000004.json").read_text())["datasets"][
        "products"
    ]["rewards"]
    assert [[sample[1] for sample in row["after"]["samples"]] for row in rows] == recorded
    assert len(rows) == 4 and all(row["before"]["reward"] is not None for row in rows)


def test_the_ledger(runs: Runs, folder: Path) -> None:
    values = ask(runs, "ledger")
    assert values["problems"] == [] and values["counts"]["trained"] == 8
    assert sum(counts["trained"] for _, counts in values["steps"]) == 8
    (folder / "ledger.jsonl").unlink()
    assert "no ledger" in ask(runs, "ledger")["missing"]


def test_the_engines(runs: Runs) -> None:
    values = ask(runs, "engines")
    assert (
        values["totals"]["rollout/engine_lost_count"] == 0
        and "perf/rollout_time" in values["metrics"]
    )
    logs = {log["name"]: log for log in values["logs"]}
    assert "engine-0.log" in logs and any(
        "step 4/4" in line for line in logs["driver.log"]["lines"]
    )


@pytest.mark.parametrize(
    "path",
    [
        "/api", "/api/run", "/api/run/other/overview", "/api/run/tiny", "/api/run/tiny/nothing",
        "/api/run/tiny/step/-1", "/api/run/tiny/step/x", "/api/run/tiny/sample/rollout/0/999",
        "/api/run/tiny/series/none", "/api/run/tiny/prompt/0", "/api/run/tiny/sample/..%2f..%2fetc/0/0",
        "/api/run/..%2ftiny/overview", "/api/run/tiny/step/99999999999999999999",
    ],
)  # fmt: skip
def test_what_does_not_exist(runs: Runs, path: str) -> None:
    with pytest.raises(NotFound):
        answer(runs, path)


def test_folders_without_a_run_are_named(folder: Path, tmp_path: Path) -> None:
    (folder.parent / "data").mkdir()
    with pytest.raises(
        NoRuns,
        match=r"no folder of a run: .*/data is not .*; runs near it: .*/tiny; .*/none does not",
    ):
        Runs([folder.parent / "data", tmp_path / "none"], None)


def test_a_run_that_cannot_be_read_does_not_keep_the_page_from_the_others(
    folder: Path, tmp_path: Path
) -> None:
    damaged = folder.parent / "a damaged run"
    damaged.mkdir()
    (damaged / "config.yaml").write_text("{}")
    (damaged / "metrics.jsonl").write_text('{"rollout/step": "nan"}\n')
    runs = Runs([folder.parent], None)
    runs.refresh()
    tiny = runs.get("tiny")
    assert tiny is not None and tiny.series.steps == 4 and not tiny.index.pending
    assert json.loads(as_json(answer(runs, "/api/run/tiny/steps")))["samples"] == [8, 8, 8, 8]
    runs.close()


def test_runs_with_the_same_name_are_told_apart(folder: Path, tmp_path: Path) -> None:
    import shutil

    other = shutil.copytree(folder, tmp_path / "b" / "tiny")
    both = Runs([folder, other], None)
    assert {run.key: run.folder for run in both.all()} == {"tiny": folder, "tiny~2": other}
    shutil.copytree(folder, folder.parent / "later")
    both.places.append(folder.parent)
    both.find()
    assert both.get("later") is not None


def test_a_run_of_one_step_has_taken_the_time_of_this_step(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text(
        '{"rollout/step": 0, "time": 1000.0, "perf/step_time": 12.5}\n'
    )
    runs = Runs([folder.parent], None)
    runs.refresh()
    tiny = runs.get("tiny")
    assert tiny is not None and tiny.series.last_time - tiny.series.first_time == 12.5


def test_a_group_has_its_data_set_and_each_of_several_rewards(runs: Runs, folder: Path) -> None:
    path = folder / "samples" / "rollout_000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    group = rows[0]["group_index"]
    members = [row for row in rows if row["group_index"] == group]
    for i, row in enumerate(members):
        parts = {"right": float(i == 0), **({"short": 0.5} if i < 2 else {}), "odd": "no number"}
        row["metadata"] = {"source_name": "gsm8k", "reward_parts": parts}
    with replacing(path) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs.refresh()
    groups = {one["group"]: one for one in ask(runs, "step", 1)["groups"]}
    assert groups[group]["source"] == "gsm8k"
    assert groups[group]["rewards"] == {"right": 1 / len(members), "short": 0.5}
    others = [one for key, one in groups.items() if key != group]
    assert all(one["source"] is None and one["rewards"] == {} for one in others)
