"""The account of groups: it closes whatever happens, and does not when somebody changed it."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from slime.checkpoint.ledger import Ledger, LedgerError
from slime.checkpoint.manifest import ResumeError, check_same_prompts
from slime.checkpoint.numbers import Numbers
from slime.cli.main import main
from slime.data.sample import Sample
from slime.observability.files import take_warnings
from slime.plugins.tools.summary import read_ledger


def group(number: int, version: str | None = "0.0") -> list[Sample]:
    versions = [version] if version else []
    return [
        Sample(group_index=number, index=2 * number + i, weight_versions=versions, reward=0.5)
        for i in range(2)
    ]


class Source:
    """What pool and data source are together: new groups, and a buffer."""

    def __init__(self) -> None:
        self.next, self.buffer, self.pool = 0, [], []

    def state(self) -> tuple[int, list[int]]:
        return self.next, [*self.pool, *self.buffer]

    def load(self, state: tuple[int, list[int]]) -> None:
        self.next, self.buffer, self.pool = state[0], list(state[1]), []


class Account(RuleBasedStateMachine):
    """Groups are asked for, judged, given back; rollouts are made ahead; the run is saved, killed
    and resumed. A model of the run beside it knows which groups were trained on the lineage that is
    left."""

    @initialize(ahead=st.integers(0, 3))
    def start(self, ahead: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.jsonl"
        self.ledger, self.source = Ledger(self.path), Source()
        self.attempt = self.step = self.made = 0
        self.bound = ahead
        self.result: list[int] = []
        self.waiting: dict[int, list[int]] = {}
        self.states: dict[int, tuple[int, list[int]]] = {}
        self.trained: list[int] = []
        self.saved: dict | None = None

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def tell(self, event: str, number: int, **facts: object) -> None:
        self.ledger(event, group(number, f"{self.attempt}.{self.step}"), facts)

    @rule(count=st.integers(1, 4))
    def ask(self, count: int) -> None:
        for _ in range(count):
            if self.source.buffer:
                number = self.source.buffer.pop(0)
            else:
                number, self.source.next = self.source.next, self.source.next + 1
            self.source.pool.append(number)
            self.tell("asked", number)

    @precondition(lambda self: self.source.pool)
    @rule(
        which=st.integers(0, 9),
        verdict=st.sampled_from(["accepted", "accepted", "filtered", "replaced"]),
    )
    def judge(self, which: int, verdict: str) -> None:
        number = self.source.pool.pop(which % len(self.source.pool))
        self.tell(verdict, number, reason="because")
        if verdict == "accepted":
            self.result.append(number)

    @precondition(lambda self: self.source.pool)
    @rule(which=st.integers(0, 9))
    def give_back(self, which: int) -> None:
        number = self.source.pool.pop(which % len(self.source.pool))
        self.source.buffer.append(number)
        self.tell("given_back", number)

    @precondition(lambda self: self.made <= self.step + self.bound)
    @rule()
    def complete(self) -> None:
        held = [group(number) for number in self.source.state()[1]]
        self.ledger.complete(
            self.made, [group(number) for number in self.result], held, self.source.next
        )
        self.waiting[self.made], self.result = self.result, []
        self.states[self.made] = self.source.state()
        self.made += 1

    @precondition(lambda self: self.step in self.waiting)
    @rule()
    def train(self) -> None:
        self.trained += self.waiting.pop(self.step)
        self.ledger.trained(self.step)
        self.step += 1

    @precondition(lambda self: self.step > 0)
    @rule()
    def save(self) -> None:
        state = self.ledger.cut(self.step - 1, self.made - 1)
        self.saved = {
            "ledger": json.loads(json.dumps(state)),
            "source": self.states.get(self.made - 1),
            "waiting": {k: list(v) for k, v in self.waiting.items()},
            "step": self.step, "made": self.made, "trained": list(self.trained),
        }  # fmt: skip
        report = read_ledger(self.path)
        assert report.closes, report.problems
        assert report.counts["trained"] == len(set(self.trained)) == len(self.trained)
        assert {row["group"] for row in report.cut["open"]} == set(self.states[self.made - 1][1])
        assert len(self.ledger.given.intervals) <= 1

    @precondition(lambda self: self.saved is not None)
    @rule(elsewhere=st.booleans())
    def kill_and_resume(self, elsewhere: bool) -> None:
        saved, self.attempt = self.saved, self.attempt + 1
        if elsewhere:
            self.path = self.path.with_name(f"ledger{self.attempt}.jsonl")
        with open(self.path, "a") as file:
            file.write('{"group": 5, "sta')  # what was being written when it was killed
        self.ledger, self.source = Ledger(self.path), Source()
        self.ledger.restore(saved["ledger"], self.attempt)
        self.source.load(saved["source"])
        self.waiting = {k: list(v) for k, v in saved["waiting"].items()}
        self.states = {saved["made"] - 1: saved["source"]}
        self.step, self.made, self.trained = saved["step"], saved["made"], list(saved["trained"])
        self.result = []
        if elsewhere:
            self.saved = None


Account.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_the_account_closes_whatever_happens = Account.TestCase


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of two steps: two groups trained, one filtered, one open."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for number in range(4):
        ledger("asked", group(number, None), {})
    ledger("accepted", group(0), {})
    ledger("filtered", group(1), {"reason": "zero_std"})
    ledger.complete(0, [group(0)], [group(2), group(3)], 4)
    ledger("accepted", group(2, "0.1"), {})
    ledger.complete(1, [group(2, "0.1")], [group(3)], 4)
    ledger.cut(0, 1)
    ledger.cut(1, 1)
    return tmp_path


def test_slime_ledger_prints_the_account(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    for words in (
        "trained",
        "filtered",
        "consistent: 4 groups were requested",
        "open groups (1 of 1)",
        "0.1",
    ):
        assert words in shown, shown
    assert main(["ledger", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"] == {"trained": 2, "filtered": 1}
    assert main(["ledger", str(run_dir / "nowhere")]) == 1


def lose_a_row(lines: list[dict]) -> None:
    del lines[0]


def train_one_twice(lines: list[dict]) -> None:
    lines.insert(1, lines[0])


def another_end(lines: list[dict]) -> None:
    lines[1]["state"] = "trained"


def another_group(lines: list[dict]) -> None:
    lines[0]["group"] = 9


def an_open_group_forgotten(lines: list[dict]) -> None:
    lines[-1]["open"] = []


def an_open_group_is_closed_too(lines: list[dict]) -> None:
    lines[-1]["open"][0]["group"] = 0


def no_checkpoint(lines: list[dict]) -> None:
    lines[:] = [line for line in lines if "cut" not in line]


DOCTORS = [
    lose_a_row, train_one_twice, another_end, another_group, an_open_group_forgotten, an_open_group_is_closed_too,
    no_checkpoint,
]  # fmt: skip


@pytest.mark.parametrize("doctor", DOCTORS, ids=lambda doctor: doctor.__name__)
def test_a_doctored_ledger_does_not_close(
    run_dir: Path, doctor, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_dir / "ledger.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    doctor(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["ledger", str(run_dir)]) == 1
    found = "not checked: " if doctor is no_checkpoint else "inconsistent: "
    assert found in capsys.readouterr().out


def test_what_is_lost_or_used_twice_is_an_error_at_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for number in range(3):
        ledger("asked", group(number), {})
    with pytest.raises(LedgerError, match=r"group 1.*in flight"):
        ledger("asked", group(1), {})
    ledger("accepted", group(0), {})
    with pytest.raises(LedgerError, match=r"group 0.*closed"):
        ledger("asked", group(0), {})
    with pytest.raises(LedgerError, match=r"group 0.*rollout 0"):
        ledger("accepted", group(0), {})
    for accepted, open_ones, supplied, named in (
        ([0], [1], 3, "open groups: 2"),
        ([0], [0, 1, 2], 3, "closed groups: 0"),
        ([], [1, 2], 3, r"accepted.*: 0"),
        ([0], [1, 2], 4, "supplied: 3"),
    ):
        with pytest.raises(LedgerError, match=named):
            ledger.complete(0, list(map(group, accepted)), list(map(group, open_ones)), supplied)


def test_user_code_may_take_groups_and_put_them_back(tmp_path: Path) -> None:
    """A replay buffer, a rollout function that reports nothing: the account follows what it
    finds.
    """
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, strict=False)
    ledger.complete(0, [group(0), group(1)], [group(2)], 4)  # 3 was taken by a hook
    ledger.complete(1, [group(2), group(0)], [group(1)], 4)  # 0 and 1 were put back
    assert ledger.cut(1, 1)["counts"] == {"trained": 4, "discarded": 1}
    report = read_ledger(path)
    assert report.closes, report.problems
    again = Ledger(path, strict=False)
    again.restore(ledger.cut(1, 1), 1)
    again.complete(2, [group(1)], [], 4)
    again.cut(2, 2)
    report = read_ledger(path)
    assert report.closes and report.counts["trained"] == 5, report.problems


def test_a_source_without_a_buffer_loses_what_comes_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", keeps=False)
    ledger("asked", group(0), {})
    ledger("given_back", group(0), {})
    ledger.complete(0, [], [], 1)
    assert ledger.cut(0, 0)["counts"] == {"lost": 1}


def test_rows_beyond_the_snapshot_are_rolled_back(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(run_dir / "ledger.jsonl")
    first = json.loads((run_dir / "ledger.jsonl").read_text().splitlines()[2])
    position = sum(
        len(line) + 1 for line in (run_dir / "ledger.jsonl").read_text().splitlines()[:3]
    )
    ledger.restore({**first, "position": position, "complete": 1}, attempt=1)
    assert main(["ledger", str(run_dir)]) == 0
    assert (
        "attempt 1 continued after step 0: 1 groups that later steps had closed were rolled back "
        "(2)"
    ) in " ".join(capsys.readouterr().out.split())


def test_a_long_run_is_small_in_memory(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for step in range(200):
        for number in range(4 * step, 4 * step + 4):
            ledger("asked", group(number), {})
            ledger("accepted", group(number), {})
        ledger.complete(step, [group(n) for n in range(4 * step, 4 * step + 4)], [], 4 * step + 4)
        ledger.trained(step)
    assert not ledger.open and not ledger.rollouts and len(ledger.cuts) == 1
    assert ledger.given.intervals == [[0, 800]]


def steps(ledger: Ledger, first: int, last: int) -> None:
    for step in range(first, last):
        ledger("asked", group(step), {})
        ledger("accepted", group(step), {})
        ledger.complete(step, [group(step)], [], step + 1)
        ledger.trained(step)


def test_groups_that_are_not_trained_are_left_out_and_the_others_are_not(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for number in range(3):
        ledger("asked", group(number), {})
        ledger("accepted", group(number), {})
    ledger.complete(0, [group(number) for number in range(3)], [], 3)
    ledger.left_out(0, [0, 1])
    ledger.trained(0)
    ledger.close()
    rows = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [(row["group"], row["state"]) for row in rows] == [
        (0, "trained"),
        (1, "trained"),
        (2, "left out"),
    ]


def test_a_group_belongs_to_the_rollout_that_asked_for_it_also_after_a_resume(
    tmp_path: Path,
) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    steps(ledger, 0, 2)
    state = ledger.cut(1, 1)
    ledger("asked", group(2), {})
    assert ledger.open[2].asked == 2
    ledger.close()
    resumed = Ledger(tmp_path / "ledger.jsonl")
    resumed.restore(state, 1)
    resumed("asked", group(2), {})
    assert resumed.open[2].asked == 2


def test_rows_wait_for_room_on_a_full_disk(
    tmp_path: Path, small_disk: Callable[[int], None]
) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger, room = Ledger(path), resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    steps(ledger, 0, 2)
    full = path.stat().st_size + 7  # a part of the next row
    small_disk(full)
    steps(ledger, 2, 9)
    saved = ledger.cut(8, 8)
    assert path.stat().st_size == full < saved["position"]
    small_disk(room)
    steps(ledger, 9, 10)
    ledger.cut(9, 9)
    ledger.close()
    report = read_ledger(path)
    assert report.closes and report.counts["trained"] == 10, report.problems

    resumed = Ledger(path)
    resumed.restore(saved, attempt=1)
    steps(resumed, 9, 11)
    resumed.cut(10, 10)
    report = read_ledger(path)
    assert report.closes and report.counts["trained"] == 11, report.problems


def test_a_file_that_lacks_rows_of_the_snapshot_is_moved_aside(tmp_path: Path) -> None:
    """Killed while rows waited for room, or the machine lost power; the account goes on all the
    same.
    """
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    steps(ledger, 0, 5)
    saved = ledger.cut(4, 4)
    os.truncate(path, path.stat().st_size - 3)
    take_warnings()
    resumed = Ledger(path)
    resumed.restore(saved, attempt=1)
    (told,) = take_warnings()
    assert "fewer rows" in told and (tmp_path / "ledger.lost.jsonl").is_file()
    steps(resumed, 5, 7)
    resumed.cut(6, 6)
    report = read_ledger(path)
    assert report.closes and report.counts["trained"] == 7, report.problems


def test_the_ledger_of_another_run_is_moved_aside_whole(tmp_path: Path) -> None:
    """A run resumes into a folder of the same name that holds another, longer run."""
    mine, other = Ledger(tmp_path / "mine.jsonl"), Ledger(tmp_path / "ledger.jsonl")
    steps(mine, 0, 3)
    saved = mine.cut(2, 2)
    steps(other, 0, 9)
    other.cut(8, 8)
    whole = other.path.read_bytes()
    take_warnings()
    resumed = Ledger(other.path)
    resumed.restore(saved, attempt=1)
    (told,) = take_warnings()
    assert "another run" in told
    assert (tmp_path / "ledger.lost.jsonl").read_bytes() == whole
    steps(resumed, 3, 4)
    resumed.cut(3, 3)
    report = read_ledger(other.path)
    assert report.closes and report.counts["trained"] == 4, report.problems


def test_numbers_behave_like_a_set() -> None:
    from hypothesis import given

    @given(st.lists(st.tuples(st.booleans(), st.integers(0, 12))), st.sets(st.integers(0, 12)))
    def check(changes: list[tuple[bool, int]], others: set[int]) -> None:
        numbers, plain, other = Numbers(), set(), Numbers()
        for add, number in changes:
            (numbers.add if add else numbers.remove)(number)
            (plain.add if add else plain.discard)(number)
        for number in others:
            other.add(number)
        assert [n for n in range(-1, 14) if n in numbers] == sorted(plain) and len(numbers) == len(
            plain
        )
        assert numbers.intervals == sorted(numbers.intervals) and all(
            a < b for a, b in numbers.intervals
        )
        assert numbers.missing_in(other) == sorted(plain - others)

    check()


def test_another_rollout_seed_cannot_resume() -> None:
    then = {"rollout_seed": 42, "lr": 1e-6}
    check_same_prompts(then, {"rollout_seed": 42, "lr": 2e-6})
    with pytest.raises(ResumeError, match="rollout_seed: 42 -> 7"):
        check_same_prompts(then, {"rollout_seed": 7, "lr": 1e-6})
