"""Steps, Ctrl-C, callbacks and results over the real driver, with fakes at its edges."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "cluster"))
from driver_parts import Driver

import slime
from slime.api import trainer as trainer_module
from slime.api.table import Table
from slime.api.trainer import Closed, Trainer
from slime.cluster import run as run_module
from slime.cluster.stop_signals import StopRequested, StopSignals
from slime.data.sample import Sample
from slime.observability.metrics import MetricsLogger
from slime.observability.run_dir import RunDir

QUIET = ("trained", "add_phases", "begin_update", "end_update", "actor has saved", "save_state")


class Program:
    """A program with a fake driver behind ``open_run``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch, self.folder = monkeypatch, folder
        self.ended: list[BaseException | None] = []
        self.flags: dict[str, Any] = {}
        self.driver: Driver

    def open_run(self, args: Any, in_program: bool) -> Any:
        assert in_program

        @contextlib.contextmanager
        def opened() -> Iterator[Any]:
            with self.driver.stop:
                try:
                    yield self.driver.run
                except BaseException as error:
                    self.ended.append(error)
                    raise
                run_module.complete(self.driver.run)
                self.ended.append(None)

        return opened()

    def trainer(self, callbacks: Any = (), **flags: Any) -> Trainer:
        data = {"eval_prompt_data": ["gsm8k", "gsm8k.jsonl"]} if "eval_interval" in flags else {}
        self.driver = Driver(**flags, **data)
        self.driver.stop.in_program = True
        run_dir = RunDir.create(
            self.driver.args.with_values(output_dir=str(self.folder), run_name="run")
        )
        self.driver.log.display.run_dir = run_dir
        self.driver.log._metrics = MetricsLogger(
            self.driver.args.with_values(use_tensorboard=False), run_dir
        )
        self.patch.setattr(run_module, "open_run", self.open_run)
        self.patch.setattr(trainer_module, "parse", lambda keywords, folder: self.driver.args)
        return Trainer("model", ["prompt"], callbacks=callbacks)

    def said(self) -> list[str]:
        return [what for what in self.driver.said if what not in QUIET]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Program]:
    before = signal.getsignal(signal.SIGINT)
    yield Program(monkeypatch, tmp_path)
    if trainer_module.current is not None:
        trainer_module.current.close()
    assert signal.getsignal(signal.SIGINT) is before, "the program's handler is restored"


def interrupt_in(program: Program, method: str, times: int = 1) -> None:
    """Let Ctrl-C come while the actor's ``method`` runs, ``times`` times."""
    left = [times]
    inner = program.driver.actor_manager.results.get(method, lambda *_: None)

    def interrupted(*arguments: Any) -> Any:
        if left[0]:
            left[0] -= 1
            os.kill(os.getpid(), signal.SIGINT)
        return inner(*arguments)

    program.driver.actor_manager.results[method] = interrupted


def test_steps_are_those_of_the_loop(program: Program, tmp_path: Path) -> None:
    trainer = program.trainer(
        num_rollout=2, eval_interval=2, save_interval=2, save=str(tmp_path / "saved")
    )
    assert program.said() == ["actor sends 0.0"]
    metrics = trainer.step()
    assert (
        metrics["rollout/id"] == 0.0 and metrics["perf/step_time"] > 0 and trainer.next_rollout == 1
    )
    trainer.step()
    assert program.said() == [
        "actor sends 0.0", "generate", "actor trains", "actor sends 0.1",
        "generate", "actor trains", "actor saves", "actor sends 0.2", "eval",
    ]  # fmt: skip
    with pytest.raises(Closed, match="2 rollouts"):
        trainer.step()
    assert [row["rollout/step"] for row in trainer.history] == [0, 1]
    assert trainer.evaluations.column("eval/gsm8k") == [0.5]
    assert [path.name for path in trainer.checkpoints] == ["iter_0000001"]
    trainer.close()
    trainer.close()
    assert program.ended == [None] and program.driver.run.completed
    with pytest.raises(Closed, match="have ended"):
        trainer.step()


def test_an_evaluation_without_data_is_refused_and_the_run_goes_on(program: Program) -> None:
    trainer = program.trainer(num_rollout=1)
    with pytest.raises(ValueError, match="eval_data"):
        trainer.evaluate()
    trainer.step()
    assert "eval" not in program.said() and len(trainer.history) == 1


def test_train_is_the_whole_loop(program: Program) -> None:
    program.flags = {"num_rollout": 2, "eval_interval": 1}
    made: list[Trainer] = []

    def make(*arguments: Any, callbacks: Any, **flags: Any) -> Trainer:
        made.append(program.trainer(callbacks, **flags))
        return made[0]

    program.patch.setattr("slime.api.run.Trainer", make)
    result = slime.train("model", ["prompt"], num_rollout=2, eval_interval=1)
    assert program.said() == [
        "actor sends 0.0", "eval", "generate", "actor trains", "actor sends 0.1", "eval",
        "generate", "actor trains", "actor sends 0.2", "eval", "close_account",
    ]  # fmt: skip
    assert not result.interrupted and len(result.history) == 2 and len(result.evaluations) == 3
    assert "Result(complete: 2 steps" in repr(result) and result.folder == made[0].folder
    assert program.ended == [], "the engines still answer"
    with result:
        pass
    assert program.ended == [None]


def test_ctrl_c_during_generation_ends_the_call_and_the_next_step_takes_the_same_rollout(
    program: Program,
) -> None:
    trainer = program.trainer(num_rollout=2)
    interrupt_in(program, "generate")
    with pytest.raises(KeyboardInterrupt):
        trainer.step()
    assert (
        program.said() == ["actor sends 0.0", "generate"]
        and trainer.next_rollout == 0
        and trainer.is_open
    )
    assert trainer.step()["rollout/id"] == 0.0
    assert program.said() == ["actor sends 0.0", "generate", "actor trains", "actor sends 0.1"], (
        "generated once"
    )


def test_ctrl_c_during_training_ends_after_the_step(program: Program) -> None:
    trainer = program.trainer(num_rollout=2)
    program.patch.setattr(
        program.driver.actor,
        "say",
        lambda what: os.kill(os.getpid(), signal.SIGINT) if what == "trains" else None,
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.step()
    assert (
        trainer.next_rollout == 1
        and len(trainer.history) == 1
        and program.driver.pool.clock.version == "0.1"
    )


def test_ctrl_c_during_an_evaluation_keeps_it_for_later(program: Program) -> None:
    trainer = program.trainer(num_rollout=2, eval_interval=1)
    interrupt_in(program, "eval")
    with pytest.raises(KeyboardInterrupt):
        trainer.step()
    assert len(trainer.history) == 1 and len(trainer.evaluations) == 0
    trainer.step()
    assert program.said().count("eval") == 2 and trainer.evaluations.column("eval/step") == [1, 2]


def test_a_second_ctrl_c_ends_the_run(program: Program) -> None:
    trainer = program.trainer(num_rollout=2)

    def twice(rollout_id: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    program.driver.actor_manager.results["generate"] = twice
    with pytest.raises(KeyboardInterrupt):
        trainer.step()
    assert not trainer.is_open and isinstance(program.ended[0], KeyboardInterrupt)


def test_train_returns_what_was_trained_until_ctrl_c(program: Program) -> None:
    seen: list[int] = []

    def press(trainer: Trainer, metrics: Mapping[str, float]) -> None:
        seen.append(trainer.next_rollout)
        if trainer.next_rollout == 1:
            interrupt_in(program, "generate")

    program.patch.setattr(
        "slime.api.run.Trainer", lambda *_, callbacks, **flags: program.trainer(callbacks, **flags)
    )
    result = slime.train("model", ["prompt"], callbacks=[press], num_rollout=3)
    assert result.interrupted and seen == [1] and "1 steps" in repr(result)
    assert result.trainer.step()["rollout/id"] == 1.0, "everything is usable"
    result.close()
    assert program.ended == [None]


def test_an_error_closes_the_run_and_comes_as_it_is(program: Program) -> None:
    trainer = program.trainer(num_rollout=2)

    def fail(rollout_id: int) -> None:
        raise RuntimeError("no memory")

    program.driver.actor_manager.results["generate"] = fail
    with pytest.raises(RuntimeError, match="no memory"):
        trainer.step()
    assert not trainer.is_open and str(program.ended[0]) == "no memory"


def test_callbacks_hear_of_every_phase_and_can_stop_the_run(
    program: Program, tmp_path: Path
) -> None:
    heard: list[str] = []

    class Listener(slime.Callback):
        def on_start(self, trainer: Trainer) -> None:
            heard.append("start")

        def on_step(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
            heard.append(f"step {metrics['rollout/id']:.0f}")
            if trainer.next_rollout == 2:
                trainer.stop()

        def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
            heard.append(f"evaluate {metrics['eval/gsm8k']}")

        def on_save(self, trainer: Trainer, folder: Path) -> None:
            heard.append(f"save {folder.name}")

        def on_end(self, trainer: Trainer) -> None:
            heard.append("end")

    called: list[float] = []
    listeners = [Listener(), lambda trainer, metrics: called.append(metrics["rollout/id"])]
    saving = {"save_interval": 2, "save": str(tmp_path / "s")}
    trainer = program.trainer(
        listeners, num_rollout=5, eval_interval=2, skip_eval_before_train=True, **saving
    )
    trainer.run()
    assert heard == [
        "start",
        "step 0",
        "step 1",
        "save iter_0000001",
        "evaluate 0.5",
        "end",
    ] and called == [0.0, 1.0]
    with pytest.raises(Closed):
        trainer.step()


def test_callbacks_hear_of_what_was_complete_when_ctrl_c_ended_the_call(
    program: Program, tmp_path: Path
) -> None:
    heard: list[str] = []

    class Listener(slime.Callback):
        def on_step(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
            heard.append(f"step {metrics['rollout/id']:.0f}")

        def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
            heard.append(f"evaluate {len(trainer.evaluations)}")

        def on_save(self, trainer: Trainer, folder: Path) -> None:
            heard.append(f"save {folder.name}")

    saving = {"save_interval": 1, "save": str(tmp_path / "s")}
    trainer = program.trainer([Listener()], num_rollout=3, eval_interval=1, **saving)
    interrupt_in(program, "eval")
    with pytest.raises(KeyboardInterrupt):
        trainer.step()
    assert heard == ["step 0", "save iter_0000000"]
    say = program.driver.actor.say

    def press(what: str) -> None:
        say(what)
        if what == "trains":
            os.kill(os.getpid(), signal.SIGINT)

    program.patch.setattr(program.driver.actor, "say", press)
    heard.clear()
    with pytest.raises(KeyboardInterrupt):
        trainer.step()
    assert heard == ["evaluate 1", "step 1", "save iter_0000001"]
    program.patch.setattr(program.driver.actor, "say", say)
    heard.clear()
    trainer.evaluate()
    assert heard == ["evaluate 3"] * 2, "the one that was interrupted, and the new one"


def test_a_run_that_is_stopped_early_is_saved_once(program: Program, tmp_path: Path) -> None:
    trainer = program.trainer(num_rollout=9, save_interval=20, save=str(tmp_path / "s"))
    for _ in range(3):
        trainer.step()
    trainer.finish()
    trainer.close()
    assert [path.name for path in trainer.checkpoints] == ["iter_0000002"]
    assert program.said().count("actor saves") == 1
    one = program.trainer(num_rollout=9, save_interval=20, save=str(tmp_path / "t"))
    with pytest.raises(ArithmeticError), one:
        one.step()
        raise ArithmeticError("the weights are what went wrong")
    assert not one.checkpoints
    unsaved = program.trainer(num_rollout=9)
    unsaved.step()
    unsaved.close()
    assert not unsaved.checkpoints, "nobody asked for snapshots"


def test_a_snapshot_that_is_still_being_written_is_named_and_completed_after_ctrl_c(
    program: Program, tmp_path: Path
) -> None:
    heard: list[str] = []

    class Listener(slime.Callback):
        def on_save(self, trainer: Trainer, folder: Path) -> None:
            heard.append(f"save {folder.name}, {folder.is_dir()}")

        def on_end(self, trainer: Trainer) -> None:
            heard.append("end")

    saving = {"save_interval": 1, "save": str(tmp_path / "s"), "async_save": True}
    trainer = program.trainer([Listener()], num_rollout=5, **saving)
    program.driver.run.snapshots.commit_if_written = lambda: None  # the disk is slow
    trainer.step()
    assert heard == ["save iter_0000000, False"]
    program.driver.run.asked = 1  # the next rollout is being generated
    trainer.close()
    assert heard[1:] == ["end"] and [path.name for path in trainer.checkpoints] == ["iter_0000000"]


def test_what_was_trained_before_ctrl_c_is_saved_at_the_end(
    program: Program, tmp_path: Path
) -> None:
    heard: list[Path] = []

    class Listener(slime.Callback):
        def on_save(self, trainer: Trainer, folder: Path) -> None:
            heard.append(folder)

    trainer = program.trainer(
        [Listener()], num_rollout=5, save_interval=4, save=str(tmp_path / "s")
    )
    trainer.step()
    program.driver.run.asked = 1  # the next rollout is being generated
    trainer.close()
    assert trainer.checkpoints == heard == [tmp_path / "s" / "iter_0000000"]


@pytest.mark.parametrize("save", [None, "run/checkpoints"])
def test_a_run_keeps_its_files_when_a_later_one_has_its_name(
    program: Program, tmp_path: Path, save: str | None
) -> None:
    folder = {} if save is None else {"save": str(tmp_path / save), "save_interval": 1}
    first = program.trainer(num_rollout=2, **folder)
    first.step()
    if save is None:
        first.save()
    metrics = list(first.history)
    second = program.trainer(num_rollout=2, **folder)
    second.step()
    second.step()
    assert first.folder == tmp_path / "run.1" and second.folder == tmp_path / "run"
    assert first.history == metrics and len(second.history) == 2
    assert first.checkpoints == [tmp_path / "run.1" / "checkpoints" / "iter_0000000"]


def test_a_snapshot_can_be_written_without_a_folder_of_the_users(program: Program) -> None:
    trainer = program.trainer(num_rollout=2)
    with pytest.raises(ValueError, match="to save"):
        trainer.save()
    trainer.step()
    assert trainer.save() == trainer.folder / "checkpoints" / "iter_0000000"
    assert trainer.checkpoints == [trainer.folder / "checkpoints" / "iter_0000000"]


def test_the_newest_snapshot_is_the_last_that_was_written(program: Program, tmp_path: Path) -> None:
    """A run that goes on from an earlier snapshot (``ckpt_step``) finds later ones in the
    folder.
    """
    first = program.trainer(num_rollout=2, save=str(tmp_path / "s"))
    for _ in range(2):
        first.step()
    assert first.save().name == "iter_0000001"
    again = program.trainer(num_rollout=2, save=str(tmp_path / "s"))
    again.step()
    assert again.save().name == "iter_0000000"
    assert [path.name for path in again.checkpoints] == ["iter_0000001", "iter_0000000"]


def test_a_new_trainer_closes_the_one_before(program: Program) -> None:
    first = program.trainer()
    second = program.trainer()
    assert not first.is_open and second.is_open


def test_responses_to_prompts(program: Program) -> None:
    trainer = program.trainer()
    asked: list[Any] = []

    def complete(prompts: list[Any], n: int, changes: Mapping[str, object]) -> list[list[Sample]]:
        asked.append((prompts, n, changes))
        return [[_answer(f"{place}.{k}") for k in range(n)] for place in range(len(prompts))]

    program.driver.actor_manager.results["complete"] = complete
    messages = [{"role": "user", "content": "hi"}]
    assert trainer.generate("hi", temperature=0.5) == "0.0"
    assert trainer.generate(messages) == "0.0"
    assert trainer.generate(["a", messages]) == ["0.0", "1.0"]
    assert trainer.generate("a", n=2) == ["0.0", "0.1"]
    assert [one.response for one in trainer.sample("a", n=2)] == ["0.0", "0.1"]  # type: ignore[union-attr]
    assert asked[0] == (["hi"], 1, {"temperature": 0.5}) and asked[1][0] == [messages]


@pytest.mark.parametrize(
    ("prompts", "more", "told"),
    [
        (5, {}, "prompts are a text, a list of messages, or a list of these, not a int"),
        ({"role": "user"}, {}, "not a dict"),
        (b"a", {}, "not a bytes"),
        (["a", 5], {}, "the prompt 1 must be a text or a list of messages, not int 5"),
        ([[{"role": "user"}]], {}, "message 0 of 0 has a content that is NoneType None"),
        ("\ud83d", {}, "the prompt 0: its text has half of a surrogate pair"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}],
            {},
            "half of a surrogate pair",
        ),
        (
            [{"role": "user", "content": [{"image": b"x"}]}],
            {},
            "the prompt 0: Object of type bytes",
        ),
        ("a", {"n": 0}, "n must be a whole number from 1 to 10000, not 0"),
        ("a", {"n": True}, "not True"),
        ("a", {"n": 10**9}, "n must be"),
        ("a", {"temperature": float("nan")}, "temperature=nan: Out of range float"),
        ("a", {"stop": {"x"}}, "stop={'x'}: Object of type set"),
    ],
)
def test_wrong_prompts_are_told_and_the_run_goes_on(
    program: Program, prompts: Any, more: Any, told: str
) -> None:
    trainer = program.trainer()
    program.driver.actor_manager.results["complete"] = lambda asked, *_: [
        [_answer("x")] for _ in asked
    ]
    with pytest.raises(ValueError, match=re.escape(told)):
        trainer.generate(prompts, **more)
    assert trainer.is_open and trainer.generate("a") == "x"


def test_all_that_is_wrong_with_prompts_is_told_at_once(program: Program) -> None:
    trainer = program.trainer()
    with pytest.raises(ValueError) as raised:
        trainer.sample(iter(["a", 1, None]), n=0, temperature=object())
    assert [line.split()[0] for line in str(raised.value).splitlines()] == [
        "n",
        "temperature=<object",
        "the",
        "the",
    ]


def test_what_the_engine_refuses_is_told_and_the_run_goes_on(program: Program) -> None:
    trainer = program.trainer()
    program.driver.actor_manager.results["complete"] = lambda *_: "temperature must be at least 0"
    with pytest.raises(ValueError, match=r"temperature.*0"):
        trainer.sample("a", temperature=-1)
    assert trainer.is_open


@pytest.mark.parametrize("wrong", [5, "on_step", slime.Callback])
def test_what_is_no_callback_is_told_before_the_start(program: Program, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"slime\.Callback"):
        program.trainer([wrong])
    assert trainer_module.current is None


def _answer(text: str) -> Sample:
    made = Sample()
    made.response = text
    return made


@pytest.mark.parametrize("in_program", [True, False])
def test_signals_of_a_program_are_its_own_outside_of_a_phase(in_program: bool) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stop = StopSignals(in_program)
    for _ in range(2):
        with stop:
            assert signal.getsignal(signal.SIGINT) != before[signal.SIGINT]
            assert (signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]) is in_program
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(StopRequested):
                stop.check()
        stop.forget()
        stop.check()
        assert {number: signal.getsignal(number) for number in before} == before


def test_a_notebook_shows_the_curve_and_a_table_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "0.25" in str(Table([{"rollout/step": 0, "rollout/raw_reward": 0.25}])), (
        "rich would show it elsewhere"
    )
    pytest.importorskip("matplotlib", reason="pip install 'slime-rl[plots]'")
    from slime.plugins.tools.summary.charts import reward_curve

    figure: Any = reward_curve(summary_of([0.1, 0.5]))
    assert figure._repr_png_().startswith(b"\x89PNG")


def summary_of(rewards: list[float]) -> Any:
    return {
        "run": "run", "reward_per_rollout": rewards, "eval": {}, "seconds_per_phase": {"train": 2.0},
        "num_rollouts": len(rewards), "seconds_total": 3.0,
    }  # fmt: skip


def test_a_table_shows_itself() -> None:
    rows: list[dict[str, float | None]] = [
        {"rollout/step": 0, "rollout/raw_reward": 0.25, "x/<b>": 1.0},
        {"rollout/step": 1, "rollout/raw_reward": None, "eval/set": 0.5},
    ]
    table = Table(rows)
    assert table.column("rollout/raw_reward") == [0.25, None] and table.columns[-1] == "eval/set"
    assert (
        "raw_reward" in str(table)
        and "0.25" in str(table)
        and "<td>0.5</td>" in table._repr_html_()
    )
    with pytest.raises(KeyError, match="rollout/raw_reward"):
        table.column("raw_reward")


def checks_names(function: Callable[..., Any]) -> list[str]:
    import inspect

    return [
        name for name in inspect.signature(function).parameters if name not in ("self", "callbacks")
    ]


def test_train_and_trainer_take_the_same() -> None:
    assert (
        checks_names(slime.train) == checks_names(Trainer.__init__) == checks_names(slime.dry_run)
    )
