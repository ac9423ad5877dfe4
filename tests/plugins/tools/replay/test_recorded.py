"""What the folder of a run says about the steps that can be computed again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from make_args import make_args
from transformers import LlamaConfig

from slime.checkpoint.manifest import Manifest
from slime.checkpoint.snapshot import Snapshot
from slime.config.args import Args
from slime.config.rollout import FULLY_ASYNC_FUNCTION
from slime.observability.run_dir import RunDir, public_settings
from slime.observability.run_state import (
    SentWeights,
    Settled,
    append_attempt,
    append_weights,
    digest_of_digests,
)
from slime.plugins.agents.config import AGENT_GENERATE
from slime.plugins.tools.replay import (
    RecordedRun,
    ReplayError,
    attempt_of,
    dumps_of,
    read_run,
)
from slime.plugins.tools.replay.step import Wanted, replay_step
from slime.plugins.tools.summary import Attempt, lineage, read_attempts, read_weights

SETTLED = Settled(False, False, 9, 2, 4096, 4096, 0, None, "/somewhere")


def recorded(dumps: set[int], saved: set[int], **settled: Any) -> RecordedRun:
    manifests = {number: cast(Manifest, {"rollout_id": number}) for number in saved}
    snapshots = {
        number: Snapshot(Path(f"iter_{number}"), manifest) for number, manifest in manifests.items()
    }
    new = replace(SETTLED, **settled)
    begins = {new.first_rollout: new.loaded}
    return RecordedRun(
        Path("run"),
        Args(),
        new,
        begins,
        0,
        {},
        "d/{rollout_id}.pt",
        frozenset(dumps),
        snapshots,
        {},
        {},
    )


def test_a_step_needs_its_dump_and_the_state_before_it() -> None:
    run = recorded({0, 1, 2, 3, 7}, {1, 5, 6})
    assert run.replayable() == [0, 2, 7]
    assert run.start_of(2, through=False) == 2 and run.state_before(2) == Path("iter_1")
    assert run.start_of(0, through=False) == 0 and run.state_before(0) is None, (
        "the initial weights"
    )


def test_a_removed_snapshot_of_the_start_is_no_start(tmp_path: Path) -> None:
    assert (
        recorded({4, 5}, set(), first_rollout=4, loaded=str(tmp_path / "removed")).replayable()
        == []
    )


def test_a_missing_snapshot_says_which_steps_can_be_replayed() -> None:
    run = recorded({0, 1, 2, 3, 7}, {1, 6})
    with pytest.raises(ReplayError, match=r"step 3.*0, 2, 7.*--through.*step 2"):
        run.start_of(3, through=False)
    assert run.start_of(3, through=True) == 2
    with pytest.raises(ReplayError, match=r"step 5.*0, 2, 7"):
        run.start_of(5, through=True)


def test_steps_without_dumps_cannot_be_trained_again_on_the_way() -> None:
    run = recorded({0, 4}, {1})
    with pytest.raises(ReplayError, match="before step 4") as error:
        run.start_of(4, through=True)
    assert "--through" not in str(error.value)


def test_a_critic_with_another_number_of_ranks_is_told() -> None:
    args = make_args(advantage_estimator="ppo", critic_num_nodes=1, critic_num_gpus_per_node=2)
    run: Any = SimpleNamespace(start_of=lambda *_: 0, steps=[0], args_from=lambda start: args)
    with pytest.raises(ReplayError, match="the critic has 2 ranks and the actor 1"):
        replay_step(run, Wanted(0))


def test_a_run_that_began_with_a_snapshot_starts_there(tmp_path: Path) -> None:
    run = recorded({5, 6}, set(), loaded=str(tmp_path), first_rollout=5)
    assert run.replayable() == [5] and run.state_before(5) == tmp_path


def test_the_own_snapshots_of_a_finetuned_run_are_loaded_completely() -> None:
    run = recorded({0, 1}, {0})
    changed = replace(
        run, args=run.args.with_values(finetune=True, no_load_optim=True, no_load_rng=True)
    )
    later = changed.args_from(1)
    assert (later.finetune, later.no_load_optim, later.no_load_rng) == (False, False, False)
    assert changed.args_from(0).finetune


def test_dumps_are_found_by_their_template(tmp_path: Path) -> None:
    for name in ("3.pt", "12.pt", "eval_4.pt", "5.pt.tmp"):
        (tmp_path / name).touch()
    (tmp_path / "r7").mkdir()
    (tmp_path / "r7" / "samples.pt").touch()
    assert dumps_of(str(tmp_path / "{rollout_id}.pt")) == {3, 12}
    assert dumps_of(str(tmp_path / "r{rollout_id}" / "samples.pt")) == {7}
    assert dumps_of(str(tmp_path / "missing" / "{rollout_id}.pt")) == frozenset()


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert read_attempts(run) == [] and read_weights(run.weights) == {}
    run.config.write_text("lr: 1.0e-06\n")
    append_attempt(run, SETTLED)
    with run.attempts.open("a") as file:
        file.write('{"settled": {"asyn\n')  # the driver was killed here
    run.config.write_text("lr: 0.5\n")
    append_attempt(run, replace(SETTLED, first_rollout=3))
    first, second = read_attempts(run)
    assert (first.settled, first.settings) == (SETTLED, {"lr": 1e-6})
    assert (second.settled.first_rollout, second.settings) == (3, {"lr": 0.5})
    assert run.attempts.stat().st_mode & 0o077 == 0, "settings may hold a secret"
    again = SentWeights("1.3", "c", None, 4)
    for sent in (SentWeights("0.2", "a", "bfloat16", 4), SentWeights("0.3", "b", None, 4), again):
        append_weights(run, sent)
    with run.weights.open("a") as file:
        file.write('{"version": "0.4", "dig')  # the driver was killed here
    assert read_weights(run.weights) == {2: SentWeights("0.2", "a", "bfloat16", 4), 3: again}


def test_the_digest_of_all_weights_does_not_depend_on_their_order() -> None:
    assert digest_of_digests({"a": "1", "b": "2"}) == digest_of_digests({"b": "2", "a": "1"})
    assert digest_of_digests({"a": "1", "b": "2"}) != digest_of_digests({"a": "2", "b": "1"})


def test_folders_that_cannot_be_replayed_say_why(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with pytest.raises(ReplayError, match=r"no config\.yaml"):
        read_run(tmp_path, 0)
    config = {"save_debug_rollout_data": None, "load_debug_rollout_data": None}
    run.config.write_text(yaml.safe_dump(config))
    with pytest.raises(ReplayError, match=r"attempts\.jsonl"):
        read_run(tmp_path, 0)
    append_attempt(run, SETTLED)
    with pytest.raises(ReplayError, match=r"no dumps .*--save-debug-rollout-data"):
        read_run(tmp_path, 0)
    run.config.write_text(yaml.safe_dump(config | {"save_debug_rollout_data": "{rollout_id}.pt"}))
    append_attempt(run, SETTLED)
    with pytest.raises(ReplayError, match="--lrr"):
        read_run(tmp_path, 0, ["--lrr", "1"])


# --- runs that were resumed
# -------------------------------------------------------------------------


def attempt(first: int, loaded: str | None = None, **settings: Any) -> Attempt:
    return Attempt(replace(SETTLED, first_rollout=first, loaded=loaded), settings)


def test_a_step_has_the_settings_of_the_attempt_that_trained_it_last() -> None:
    tried = [attempt(0, lr=1), attempt(4, lr=2), attempt(8, lr=3), attempt(6, lr=4)]
    kept = lineage(tried)
    assert [one.settings["lr"] for one in kept] == [1, 2, 4], (
        "the third attempt's steps were all trained again"
    )
    assert [attempt_of(kept, step).settings["lr"] for step in (0, 3, 4, 5, 6, 9)] == [
        1,
        1,
        2,
        2,
        4,
        4,
    ]


def resumed(folder: Path, second: dict[str, object], asynchronous: bool = False) -> RunDir:
    """A run of six steps that was resumed at step 3; each attempt has its own flags, dumps and
    snapshots.
    """
    model = folder / "model"
    LlamaConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2).save_pretrained(model)
    (model / "model.safetensors").touch()
    run, base = RunDir(folder), public_settings(vars(make_args(hf_checkpoint=str(model))))
    snapshot = folder / "saved" / "iter_2"
    for first, loaded, changes in (
        (0, None, {}),
        (3, str(snapshot), {"load": str(folder / "saved"), **second}),
    ):
        dumps = changes.get("save_debug_rollout_data", str(folder / "{rollout_id}.pt"))
        run.config.write_text(yaml.safe_dump({**base, "save_debug_rollout_data": dumps, **changes}))
        settled = replace(
            SETTLED, first_rollout=first, loaded=loaded, working_directory=str(folder)
        )
        append_attempt(run, replace(settled, asynchronous=asynchronous))
        # the first attempt trained step 3 too, which the second trained again
        for step in range(first, first + 4):
            Path(str(dumps).replace("{rollout_id}", str(step))).touch()
    return run


def test_earlier_steps_of_a_resumed_run_are_read_with_their_own_settings(tmp_path: Path) -> None:
    other = str(tmp_path / "second_{rollout_id}.pt")
    resumed(tmp_path, {"lr": 0.25, "save_debug_rollout_data": other})
    before, after = read_run(tmp_path, 2), read_run(tmp_path, 3)
    assert before.args.lr != 0.25 and after.args.lr == 0.25
    assert (before.template, after.template) == (str(tmp_path / "{rollout_id}.pt"), other)
    assert before.dumps == after.dumps == {0, 1, 2, 3, 4, 5, 6}
    assert read_run(tmp_path, 3, ["--lr", "0.5"]).args.lr == 0.5
    with pytest.raises(ReplayError, match="step 3"):
        after.start_of(4, through=True)
    assert before.start_of(2, through=True) == 0


@pytest.mark.parametrize(
    "generation",
    [
        {"environment": "reasoning_gym:products"},
        {"mcp_server": ["python server.py"]},
        {"agent_function_path": "gone.py:run"},
        {"custom_rm_path": "gone.py:reward", "custom_generate_function_path": "gone.py:generate"},
        {"rollout_function_path": "gone.py:rollout", "rollout_sample_hook_path": ["gone.py:hook"]},
        {"eval_config": "gone.yaml", "custom_rollout_log_function_path": "gone.py:log"},
    ],
)
def test_what_only_generates_is_not_needed(tmp_path: Path, generation: dict[str, Any]) -> None:
    """Derived settings are recorded as well, and the files of a program's functions are removed
    when it ends.
    """
    derived = make_args(**generation) if "gone" not in str(generation) else None
    names = ("data_source_path", "custom_generate_function_path", "agent_function_path")
    known = {name: getattr(derived, name) for name in names} if derived is not None else {}
    if "agent_function_path" in generation:
        known = {"custom_generate_function_path": AGENT_GENERATE}
    resumed(tmp_path, known | generation)
    run = read_run(tmp_path, 4)
    assert run.args.debug_train_only
    assert bool(run.args.custom_rollout_log_function_path) == (
        "custom_rollout_log_function_path" in generation
    )


def test_a_fully_asynchronous_run_is_read_as_one(tmp_path: Path) -> None:
    resumed(tmp_path, {"rollout_function_path": FULLY_ASYNC_FUNCTION}, asynchronous=True)
    assert read_run(tmp_path, 4).args.rollout_function_path == FULLY_ASYNC_FUNCTION


def test_steps_are_trained_through_from_where_their_attempt_began(tmp_path: Path) -> None:
    resumed(tmp_path, {})
    with pytest.raises(ReplayError, match="before step 4"):
        read_run(tmp_path, 4).start_of(4, through=True)
    (tmp_path / "saved" / "iter_2").mkdir(parents=True)
    run = read_run(tmp_path, 4)
    assert (
        run.start_of(4, through=True) == 3 and run.state_before(3) == tmp_path / "saved" / "iter_2"
    )


def test_a_line_that_a_full_disk_has_cut_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.config.write_text("seed: 1\n")
    sent = [SentWeights(f"0.{step}", "d", None, 1) for step in (1, 2)]
    append_attempt(run, SETTLED)
    append_weights(run, sent[0])
    for file in (run.attempts, run.weights):
        file.write_bytes(file.read_bytes()[:-9])
    append_attempt(run, replace(SETTLED, first_rollout=3))
    append_weights(run, sent[1])
    assert [one.settled.first_rollout for one in read_attempts(run)] == [3]
    assert read_weights(run.weights) == {2: sent[1]}
    assert run.attempts.stat().st_mode & 0o777 == 0o600


def test_layers_that_a_gpu_would_compile_do_not_exclude_other_kernels(tmp_path: Path) -> None:
    """What the machine has chosen is recorded too; it was not typed."""
    exact: dict[str, object] = {"true_on_policy": True}
    exact |= {"train_backend": "fsdp", "rollout_backend": "embedded"}
    exact |= {"train_dtype": "bfloat16", "rollout_dtype": "bfloat16"}
    resumed(tmp_path, {**exact, "compile_layers": True})
    model = LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2)
    model.save_pretrained(tmp_path / "model")
    assert read_run(tmp_path, 4).args.true_on_policy
