"""What a snapshot holds of generation: as it was when the rollout was complete, whatever hooks
change later.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
from make_args import make_args

from slime.cluster.rollout_state import Rollout, RolloutState
from slime.data.sample import Group, Sample, flatten, groups_from_dicts, groups_to_dicts
from slime.data.source import RolloutDataSourceWithBuffer
from slime.data.token_fields import Packed, UnsetMask
from slime.observability.files import take_warnings


class Prompts:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> Sample:
        return Sample(prompt=[{"role": "user", "content": str(i)}], metadata={"tags": ["a"]})

    def shuffle(self, epoch_id: int) -> None:
        """The order does not matter."""


def make_state(folder: Path) -> RolloutState:
    args = make_args(
        hf_checkpoint="unused", n_samples_per_prompt=2, save=str(folder), save_interval=1
    )
    state = RolloutState(args, folder, RolloutDataSourceWithBuffer(args, Prompts()))
    state.ledger.strict = False
    return state


class Counted:
    """A data source of a user that counts its prompts, and has no state that a snapshot could
    hold.
    """

    def __init__(self, args: Any) -> None:
        self.given = 0

    def __len__(self) -> int:
        return 100

    def get_samples(self, num_samples: int) -> list[Group]:
        self.given += num_samples
        return [
            [Sample(prompt=str(number), group_index=number, index=number)]
            for number in range(self.given)[-num_samples:]
        ]

    def add_samples(self, samples: list[Group]) -> None:
        """Nothing comes back."""


class Stateful(Counted):
    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


class WithFiles(Counted):
    saved: dict[int, int]

    def save(self, rollout_id: int) -> None:
        self.saved[rollout_id] = self.given

    def load(self, rollout_id: int | None = None) -> None:
        assert rollout_id is not None
        self.given = self.saved[rollout_id]


def state_of(source: Counted, folder: Path) -> RolloutState:
    args = make_args(
        hf_checkpoint="unused", n_samples_per_prompt=1, save=str(folder), save_interval=1
    )
    return RolloutState(args, folder, source)


def resumed(source: Counted, again: Counted, folder: Path) -> Counted:
    """Two rollouts of ``source``, a snapshot after the first, and ``again`` restored from it."""
    state = state_of(source, folder)
    for number in range(2):
        state.complete(number, Rollout(answered(source.get_samples(4)), {}, 1.0))
    state.save(0, folder)
    state_of(again, folder).load(0, folder, 1)
    return again


def test_a_users_source_is_restored_by_its_state_without_methods_for_files(tmp_path: Path) -> None:
    take_warnings()  # of other tests in this process
    again = resumed(Stateful(None), Stateful(None), tmp_path)
    assert again.given == 8, "after the newest rollout, whose samples the snapshot holds"
    assert not take_warnings()


def test_a_program_may_save_without_having_asked_for_snapshots(tmp_path: Path) -> None:
    state = RolloutState(
        make_args(hf_checkpoint="unused"), tmp_path, source := Stateful(None), in_program=True
    )
    state.complete(0, Rollout(answered(source.get_samples(4)), {}, 1.0))
    source.get_samples(4)
    state.save(0, tmp_path)
    again = Stateful(None)
    state_of(again, tmp_path).load(0, tmp_path, 1)
    assert again.given == 4


def test_a_state_that_the_source_goes_on_to_change_is_copied(tmp_path: Path) -> None:
    class Live(Stateful):
        def __init__(self, args: Any) -> None:
            super().__init__(args)
            self.seen: list[int] = []

        def get_samples(self, num_samples: int) -> list[Group]:
            self.seen += range(num_samples)
            return super().get_samples(num_samples)

        def state_dict(self) -> dict[str, Any]:
            return {"given": self.given, "seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            self.seen = state["seen"]

    state = state_of(source := Live(None), tmp_path)
    state.complete(0, Rollout(answered(source.get_samples(2)), {}, 1.0))
    source.get_samples(3)  # for a rollout that is not complete yet
    state.save(0, tmp_path)
    resumed = state_of(again := Live(None), tmp_path)
    resumed.load(0, tmp_path, 1)
    again.get_samples(1)
    resumed.save(0, tmp_path / "next")
    state_of(third := Live(None), tmp_path).load(0, tmp_path / "next", 2)
    assert third.seen == [0, 1]


def test_files_that_are_written_late_are_told(tmp_path: Path) -> None:
    take_warnings()
    WithFiles.saved = {}
    args = make_args(
        hf_checkpoint="unused", n_samples_per_prompt=1, save=str(tmp_path), save_interval=5
    )
    state = RolloutState(args, tmp_path, source := WithFiles(None))
    state.complete(0, Rollout(answered(source.get_samples(4)), {}, 1.0))
    state.save(0, tmp_path)
    assert not take_warnings(), "the source has given nothing since"
    state.own_saved, state.begun = -1, 1
    source.get_samples(4)
    state.save(0, tmp_path)
    (told,) = take_warnings()
    assert "WithFiles.save" in told and "for rollout 1" in told


def test_a_source_is_not_asked_for_a_state_that_nobody_saves(tmp_path: Path) -> None:
    class Locked(Stateful):
        def state_dict(self) -> dict[str, Any]:
            raise AssertionError("no snapshot can be written")

    state = RolloutState(make_args(hf_checkpoint="unused"), tmp_path, source := Locked(None))
    state.complete(0, Rollout(answered(source.get_samples(1)), {}, 1.0))
    assert not state.ahead


def test_a_path_named_save_is_no_method(tmp_path: Path) -> None:
    source: Any = Stateful(None)
    source.save = source.load = "/a/folder"
    assert resumed(source, Stateful(None), tmp_path).given == 8


def test_a_wrapper_that_passes_its_methods_on_is_saved(tmp_path: Path) -> None:
    class Wrapper:
        def __init__(self, inner: WithFiles) -> None:
            self.inner = inner

        def __len__(self) -> int:
            return 100

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    WithFiles.saved = {}
    again = resumed(Wrapper(WithFiles(None)), inner := WithFiles(None), tmp_path)  # type: ignore[arg-type]
    assert again is inner and inner.given == 4


def test_a_users_source_is_restored_from_its_files_without_a_state(tmp_path: Path) -> None:
    WithFiles.saved = {}
    again = resumed(WithFiles(None), WithFiles(None), tmp_path)
    assert again.given == 4 and WithFiles.saved == {0: 4, 1: 8}, "after the rollout of the snapshot"
    assert not take_warnings()


def test_a_source_that_cannot_be_restored_is_named(tmp_path: Path) -> None:
    take_warnings()
    state_of(Counted(None), tmp_path)
    (told,) = take_warnings()
    assert "first prompts" in told and "Counted" in told


def answered(groups: list[Group]) -> list[Group]:
    for sample in flatten(groups):
        sample.tokens = [1, 2]
        sample.append_response_tokens(
            tokens=np.array([3, 4], np.int32),
            log_probs=[-0.1, -0.5],
            meta_info={"weight_version": "0.3"},
            text="ab",
        )
        sample.rollout_routed_experts = np.full((3, 2, 2), sample.index, np.uint8)
        sample.reward, sample.status = 1.0, Sample.Status.COMPLETED
    return groups


def test_what_hooks_change_after_the_rollout_is_not_saved(tmp_path: Path) -> None:
    state = make_state(tmp_path)
    source: Any = state.source
    trained, finished, fresh = (
        answered(source.get_samples(2)),
        answered(source.get_samples(2)),
        source.get_samples(1),
    )
    fresh[0][0].loss_mask, fresh[0][0].status = UnsetMask(), Sample.Status.ABORTED
    state.complete(0, Rollout(trained, {}, 1.0))
    source.under_way = lambda: [*finished, *fresh]
    ahead = answered(source.get_samples(1))
    expected, ahead_before = copy.deepcopy([*finished, *fresh]), copy.deepcopy(ahead)
    state.complete(1, Rollout(ahead, {"m": 1.0}, 2.0))
    for sample in flatten([*finished, *fresh, *ahead]):
        sample.tokens.append(9)
        if sample.rollout_log_probs is not None:
            sample.rollout_log_probs.clear()
        sample.metadata["late"] = sample.metadata.pop("tags")
        sample.prompt[0]["content"] = "changed"  # type: ignore[index]
        sample.version_spans.append(("9", 0, 1))
        sample.spec_info.spec_verify_ct += 1
    state.save(0, tmp_path)
    again = make_state(tmp_path)
    again.load(0, tmp_path, 1)
    expected[-1][0].loss_mask = None  # nothing was given
    for mine, theirs in zip(flatten(again.source.buffer), flatten(expected), strict=True):
        np.testing.assert_equal(mine.rollout_routed_experts, theirs.rollout_routed_experts)
        mine.rollout_routed_experts = theirs.rollout_routed_experts = None
    assert again.source.buffer == expected
    restored = again.restored.pop(1, None)
    assert restored is not None and (restored.metrics, restored.seconds) == ({"m": 1.0}, 2.0)
    for one, before in zip(flatten(restored.groups), flatten(ahead_before), strict=True):
        assert (one.tokens, one.rollout_log_probs, one.loss_mask) == (
            [1, 2, 3, 4],
            [-0.1, -0.5],
            [1, 1],
        )
        assert one.version_spans == before.version_spans and one.spec_info == before.spec_info


def test_what_hooks_change_after_a_resume_is_not_saved_either(tmp_path: Path) -> None:
    """A second resume must give the rollouts as they were generated, not as hooks of the first one
    left them.
    """
    state = make_state(tmp_path)
    for rollout_id in range(3):
        groups = answered(state.source.get_samples(1))
        for sample in flatten(groups):
            sample.reward = {"score": 1.0}
        state.complete(rollout_id, Rollout(groups, {"m": 1.0}, 1.0))
        for sample in flatten(groups):  # by a hook of the first attempt
            double(sample)
    for rollout_id in range(2):
        state.save(rollout_id, tmp_path)
        state = make_state(tmp_path)
        state.load(rollout_id, tmp_path, rollout_id + 1)
        samples = flatten([rollout.groups for rollout in state.restored.values()])
        assert [sample.reward for sample in samples] == [{"score": 1.0}] * 2 * (2 - rollout_id)
        assert all(
            "seen" not in sample.metadata and sample.tokens == [1, 2, 3, 4] for sample in samples
        )
        for sample in samples:
            double(sample)


def double(sample: Sample) -> None:
    assert isinstance(sample.reward, dict)
    sample.reward["score"] *= 2
    sample.metadata["seen"] = True
    sample.tokens.append(9)


def test_the_cost_of_a_state_does_not_depend_on_the_lengths() -> None:
    """Arrays are shared between samples and their saved form; no object is made per token."""
    groups = [[Sample(index=i, tokens=list(range(4000)), response_length=0) for i in range(4)]]
    for sample in flatten(groups):
        sample.pack()
    saved = groups_to_dicts(groups)
    for sample, data in zip(flatten(groups), saved[0], strict=True):
        held = vars(sample)["tokens"]
        assert isinstance(held, Packed) and data["tokens"] is held.values
    assert groups_from_dicts(saved) == groups
