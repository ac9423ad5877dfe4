"""The data source: groups, epochs, the buffer, and a state from which it goes on exactly."""

from __future__ import annotations

import json
import logging
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config.args import Args
from slime.data import source as source_module
from slime.data.dataset import Dataset
from slime.data.sample import Group, Sample, flatten
from slime.observability.files import take_warnings
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer, pop_first


class Prompts:
    """A data set in memory, shuffled the way the real one is asked to."""

    def __init__(self, count: int) -> None:
        self.order = list(range(count))

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> Sample:
        return Sample(prompt=f"p{self.order[position]}", metadata={"n": self.order[position]})

    def shuffle(self, epoch_id: int) -> None:
        self.order = list(range(len(self.order)))
        random.Random(epoch_id).shuffle(self.order)


def make_args(**more: Any) -> Args:
    return Args(**{"n_samples_per_prompt": 2, "rollout_shuffle": True, **more})


def buffered(count: int = 5, **more: Any) -> RolloutDataSourceWithBuffer:
    return RolloutDataSourceWithBuffer(make_args(**more), Prompts(count))


def seen(groups: list[Group]) -> list[tuple[Any, ...]]:
    return [
        tuple((s.prompt, s.group_index, s.index, s.response) for s in flatten(g)) for g in groups
    ]


def test_groups_of_copies() -> None:
    source = RolloutDataSource(make_args(rollout_shuffle=False), Prompts(3))
    first, second = source.get_samples(2)
    assert [s.prompt for s in first] == ["p0", "p0"] and [s.prompt for s in second] == ["p1", "p1"]
    assert [(s.group_index, s.index) for s in [*first, *second]] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    first[0].metadata["n"] = 99
    assert first[1].metadata == {"n": 0} and len(source) == 3


def load_dataset(args: Args) -> Dataset:
    """The data set that a run with these flags reads."""
    dataset = RolloutDataSource(args.with_values(rollout_global_dataset=True)).dataset
    assert isinstance(dataset, Dataset)
    return dataset


class Processor:
    """The part of a processor that a data set uses: an image is 9 tokens, a word is one."""

    chat_template = "only parts"

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> str:
        return " ".join(
            "<image>" if part["type"] == "image" else part["text"]
            for part in messages[0]["content"]
        )

    def __call__(self, text: list[str], images: list[Any]) -> dict[str, list[list[str]]]:
        assert len(images) == text[0].count("<image>") == 1
        return {"input_ids": [["image"] * 9 + text[0].split()[1:]]}


def test_a_limit_of_prompts_counts_the_images_of_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL.Image").new("RGB", (2, 2)).save(tmp_path / "a.png")
    rows = [
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": str(tmp_path / "a.png")},
                                                 {"type": "text", "text": text}]}]}
        for text in ("one", "one two three")
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llava", "image_token_index": 5})
    )
    monkeypatch.setattr(source_module, "load_processor", lambda *_, **__: Processor())
    monkeypatch.setattr(source_module, "load_tokenizer", lambda *_, **__: Processor())
    dataset = load_dataset(
        make_args(
            prompt_data=str(tmp_path / "rows.jsonl"), input_key="prompt", apply_chat_template=True,
            rollout_max_prompt_len=10, hf_checkpoint=str(tmp_path),
        )
    )  # fmt: skip
    assert [sample.prompt for sample in dataset.samples] == ["<image> one"]


def test_texts_for_a_model_with_images_need_no_processor(
    tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may need packages for images that a run with texts does not have."""

    def missing(*_: Any, **__: Any) -> None:
        raise ImportError("torchvision")

    (tmp_path / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "one"}]}\n')
    monkeypatch.setattr(source_module, "load_processor", missing)
    args = make_args(
        prompt_data=str(tmp_path / "rows.jsonl"), apply_chat_template=True, rollout_max_prompt_len=100,
        hf_checkpoint=str(smollm2),
    )  # fmt: skip
    assert len(load_dataset(args)) == 1


class OneOfThree(Prompts):
    """Only one prompt is short enough: the first of epoch 0, and the last of every other one."""

    def __getitem__(self, position: int) -> Sample | None:
        return Sample(prompt="short") if position == self.short else None

    def shuffle(self, epoch_id: int) -> None:
        self.short = 0 if epoch_id == 0 else len(self.order) - 1


def test_the_last_prompt_of_a_shuffled_epoch_may_be_the_only_one_that_fits() -> None:
    source = RolloutDataSource(make_args(), OneOfThree(3))
    assert [group[0].prompt for group in source.get_samples(3)] == ["short"] * 3


@pytest.mark.parametrize("changed", ["ab", "abc", "xy!"])
def test_a_resumed_run_is_told_that_its_data_file_has_changed(changed: str, tmp_path: Path) -> None:
    """In the terminal, also where the number of rows is the same."""
    file = tmp_path / "rows.jsonl"

    def source(prompts: str) -> RolloutDataSource:
        file.write_text(
            "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts.split())
        )
        return RolloutDataSource(make_args(), Dataset(str(file)))

    state = source("a b").state_dict()
    take_warnings()
    source("a b").load_state_dict(state)
    assert take_warnings() == []
    source(f"a {changed}").load_state_dict(state)
    (warning,) = take_warnings()
    assert "it had 2 prompts (32 bytes)" in warning


class Balanced(RolloutDataSourceWithBuffer):
    """In the form of a published data source: it does not call ``super().__init__()``."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.prompts = Prompts(4)

    def get_samples(self, num_samples: int) -> list[Group]:
        return [
            [self.prompts[i % 4] for _ in range(self.args.n_samples_per_prompt)]
            for i in range(num_samples)
        ]


def test_a_subclass_may_leave_out_the_base_class_init() -> None:
    source, again = Balanced(make_args()), Balanced(make_args())
    assert len(source.get_samples(2)) == 2
    source.add_samples([[Sample(index=0), Sample(index=1)]])
    source.metadata["mine"] = 1
    assert source.open_groups() == source.buffer and again.buffer == []
    again.load_state_dict(source.state_dict())
    assert again.buffer == source.buffer and again.metadata == {"mine": 1} and len(source) == 0


def test_a_buffer_filter_may_be_assigned() -> None:
    class Newest(RolloutDataSourceWithBuffer):
        def __init__(self, args: Any) -> None:
            super().__init__(args, Prompts(4))
            self.buffer_filter = self.choose if args.method else pop_first  # type: ignore[assignment]

        def choose(
            self, args: Any, rollout_id: None, buffer: list[Group], num_samples: int
        ) -> list[Group]:
            assert rollout_id is None and args is self.args
            return [buffer.pop() for _ in range(num_samples)]

    for method in (False, True):
        args = make_args()
        args.method = method
        source = Newest(args)
        groups = [[Sample(index=2 * i), Sample(index=2 * i + 1)] for i in range(3)]
        source.add_samples(groups)
        assert source.get_samples(1)[0] is groups[2 if method else 0] and len(source.buffer) == 2


def test_wraps_as_often_as_needed() -> None:
    """trap 12: a batch larger than the data set, and no use of the global generator"""
    source = RolloutDataSource(make_args(), Prompts(3))
    random.seed(1)
    before = random.getstate()
    groups = source.get_samples(10)
    assert random.getstate() == before
    assert len(groups) == 10 and [g[0].group_index for g in groups] == list(range(10))
    for epoch in range(3):
        assert sorted(str(g[0].prompt) for g in groups[3 * epoch : 3 * epoch + 3]) == [
            "p0",
            "p1",
            "p2",
        ]
    assert source.epoch_id == 3 and source.sample_offset == 1


def test_base_takes_nothing_back_and_the_buffer_does() -> None:
    plain = RolloutDataSource(make_args(), Prompts(3))
    plain.add_samples(plain.get_samples(1))
    assert [g[0].group_index for g in plain.get_samples(1)] == [1]
    source = buffered()
    a, _, c = source.get_samples(3)
    source.add_samples([c, a])
    assert [g[0].group_index for g in source.get_samples(3)] == [2, 0, 3]
    assert source.buffer == []


def test_groups_that_come_back_are_whole() -> None:
    source = buffered()
    source.add_samples([[Sample(), [Sample(), Sample()]]])  # fan-out siblings are one member
    with pytest.raises(ValueError, match=r"1 was.*2 members"):
        source.add_samples([[Sample()]])
    with pytest.raises(ValueError, match="bare sample"):
        source.add_samples([Sample()])  # type: ignore[list-item]


def best_first(args: Any, rollout_id: Any, buffer: list[Group], num_samples: int) -> list[Group]:
    assert rollout_id is None
    buffer.sort(key=lambda group: -group[0].metadata["score"])
    return [buffer.pop(0) for _ in range(min(num_samples, len(buffer)))]


def drop_all(args: Any, rollout_id: Any, buffer: list[Group], num_samples: int) -> list[Group]:
    buffer.clear()
    return []


def scored(source: RolloutDataSourceWithBuffer, scores: list[int]) -> None:
    groups = source.get_samples(len(scores))
    for group, score in zip(groups, scores, strict=True):
        group[0].metadata["score"] = score
    source.add_samples(groups)


def test_filter_hook(caplog: pytest.LogCaptureFixture) -> None:
    source = buffered(buffer_filter_path=f"{__file__}:best_first")
    scored(source, [1, 3, 2])
    assert [g[0].metadata["score"] for g in source.get_samples(2)] == [3, 2] and len(
        source.buffer
    ) == 1
    source.args.buffer_filter_path = f"{__file__}:drop_all"
    with caplog.at_level(logging.INFO):
        assert [g[0].group_index for g in source.get_samples(1)] == [3]
    assert "dropped 1 groups" in caplog.text


class Selecting(RolloutDataSourceWithBuffer):
    """As in the seeds: the method selects, and leaves the removal to the source."""

    def buffer_filter(self, args: Any, buffer: list[Group], num_samples: int) -> list[Group]:
        return sorted(buffer, key=lambda group: -group[0].metadata["score"])[:num_samples]


class Greedy(RolloutDataSourceWithBuffer):
    def buffer_filter(self, args: Any, buffer: list[Group], num_samples: int) -> list[Group]:
        return [buffer[0], buffer[0]]


def test_filter_method() -> None:
    source = Selecting(make_args(), Prompts(5))
    scored(source, [1, 3, 2])
    assert [g[0].metadata["score"] for g in source.get_samples(2)] == [3, 2]
    assert [g[0].metadata["score"] for g in source.buffer] == [1], (
        "what was given does not come again"
    )
    greedy = Greedy(make_args(), Prompts(5))
    scored(greedy, [1])
    with pytest.raises(ValueError, match="2 of 1 groups"):
        greedy.get_samples(1)


def test_pop_first() -> None:
    buffer: list[Group] = [[1], [2], [3]]
    assert pop_first(None, None, buffer, 2) == [[1], [2]] and buffer == [[3]]


steps = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 3)), min_size=1, max_size=8)


def walk(source: RolloutDataSourceWithBuffer, plan: list[tuple[int, int]]) -> list[Any]:
    """Take groups, change and give some back, as a run with partial rollouts does."""
    history = []
    for take, back in plan:
        groups = source.get_samples(take)
        history.append(seen(groups))
        for group in groups[:back]:
            group[0].response += "x"
        source.add_samples(groups[:back])
    return history


@settings(deadline=None)
@given(steps, st.integers(0, 8), st.integers(1, 6), st.booleans())
def test_any_split_point_gives_the_same_sequence(
    plan: list[Any], split: int, count: int, shuffle: bool
) -> None:
    whole = walk(buffered(count, rollout_shuffle=shuffle), plan)
    first = buffered(count, rollout_shuffle=shuffle)
    history = walk(first, plan[:split])
    state = pickle.dumps(first.state_dict())
    walk(first, plan)  # what the first process does after its snapshot was taken does not matter
    second = buffered(count, rollout_shuffle=shuffle)
    second.load_state_dict(pickle.loads(state))
    assert history + walk(second, plan[split:]) == whole


def test_the_state_is_a_value() -> None:
    source = buffered()
    group = source.get_samples(1)
    source.add_samples(group)
    source.metadata["mine"] = [1]
    state = source.state_dict()
    group[0][0].tokens.append(5)
    source.metadata["mine"].append(2)
    assert isinstance(state["buffer"][0][0], dict) and list(state["buffer"][0][0]["tokens"]) == []
    assert state["metadata"] == {"mine": [1]}
    restored = buffered()
    restored.load_state_dict(state)
    restored.buffer[0][0].tokens.append(7)
    assert list(state["buffer"][0][0]["tokens"]) == []


@pytest.mark.parametrize(("size", "indices"), [(1, [[4], [5]]), (3, [[4, 5, 6], [7, 8, 9]])])
def test_groups_of_a_run_with_another_number_of_samples_begin_again(
    size: int, indices: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """They could neither come back to the buffer nor fill a step."""
    source = buffered()
    finished, fresh = source.get_samples(2)
    finished[0].tokens, finished[0].response_length, finished[0].status = (
        [1, 2],
        1,
        Sample.Status.COMPLETED,
    )
    source.add_samples([[finished[0], [finished[1], Sample(index=1)]], fresh])
    resumed = buffered(n_samples_per_prompt=size)
    resumed.load_state_dict(source.state_dict())
    assert "2 groups" in caplog.text
    groups = resumed.get_samples(3)
    assert [[sample.index for sample in group] for group in groups[:2]] == indices
    assert [sample.group_index for sample in flatten(groups)] == [
        number for number in range(3) for _ in range(size)
    ]
    assert len({sample.index for sample in flatten(groups)}) == 3 * size
    assert all(
        sample.status is Sample.Status.PENDING and not sample.tokens for sample in flatten(groups)
    )
    assert [group[0].prompt for group in groups[:2]] == [finished[0].prompt, fresh[0].prompt]
    resumed.add_samples(groups)


def test_save_and_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = {"save": str(tmp_path), "load": str(tmp_path)}
    source = buffered(**args)
    source.add_samples(source.get_samples(2))
    source.save(3)
    file = tmp_path / "rollout" / "global_dataset_state_dict_3.pt"
    assert [p.name for p in file.parent.iterdir()] == [file.name]
    other = buffered(**args)
    other.load(3)
    assert seen(other.get_samples(4)) == seen(source.get_samples(4))
    with caplog.at_level(logging.WARNING):
        other.load(9)
        buffered(count=7, **args).load(3)
    assert "global_dataset_state_dict_9.pt" in caplog.text
    assert "had 5 prompts" in caplog.text and "has 7" in caplog.text
    fresh = buffered(**args)
    fresh.load(-1)
    fresh.load()
    assert fresh.sample_index == 0
    with pytest.raises(ValueError, match="without --save"):
        buffered().save(0)


def test_without_prompts() -> None:
    source = RolloutDataSourceWithBuffer(make_args(rollout_global_dataset=False))
    groups = source.get_samples(2)
    assert [(s.prompt, s.group_index, s.index) for g in groups for s in g] == [
        ("", 0, 0),
        ("", 0, 1),
        ("", 1, 2),
        ("", 1, 3),
    ]
    assert len(source) == 0 and source


def test_from_args(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "one", "a": 1}\n{"q": "two", "a": 2}\n')
    args = make_args(
        prompt_data=str(path),
        input_key="q",
        label_key="a",
        metadata_key="metadata",
        tool_key="tools",
        rollout_seed=1,
    )
    args.multimodal_keys = args.rollout_max_prompt_len = None
    args.apply_chat_template, args.apply_chat_template_kwargs = False, {}
    args.streaming_data, args.num_data_workers = False, 0
    groups = RolloutDataSource(args).get_samples(2)
    assert sorted((str(g[0].prompt), g[0].label) for g in groups) == [("one", "1"), ("two", "2")]
