"""A run that a program drives step by step."""

from __future__ import annotations

import atexit
import contextlib
import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from slime.api.arguments import Data, InputFolder, Prompt, check_prompts, is_single, parse
from slime.api.functions import Callback, as_callback
from slime.api.table import Table
from slime.cluster.stop_signals import StopRequested

if TYPE_CHECKING:
    from slime.cluster.phases import Run
    from slime.data.sample import Sample
    from slime.observability.run_dir import RunDir

Listener = Callback | Callable[["Trainer", Mapping[str, float]], object]


class Opened(Protocol):
    """A trainer or a session whose processes are there."""

    def close(self) -> None: ...


current: Opened | None = None
"""The one whose run is open. A process has at most one, since it has one connection to Ray."""


class Closed(RuntimeError):
    """The run is complete and cannot train, or its processes have ended and cannot generate
    either.
    """


class Trainer:
    """Engines and a trainer that have loaded a model, and take steps when they are told to.

    A step is an iteration of the loop in train.py: generate, train, bring the weights to the
    engines, and save and evaluate if ``save_interval`` and ``eval_interval`` say so. The processes
    end with :meth:`close`, at the end of a ``with`` block, when another trainer is made, and at the
    end of the program.

    Ctrl-C ends the current call with KeyboardInterrupt, and the run can go on. While responses are
    generated or evaluated, the call ends at once, and the next step continues with them; while the
    model is trained, the call ends after the step. A second Ctrl-C does not wait, and ends the run.

    Args:
        model: A Hugging Face folder or hub id.
        data: The prompts: a path, or rows (dicts with ``prompt`` and ``label``; texts; an Arrow
            table; a data frame).
        reward: A function, the name of a built-in reward (``"math"``), or the path of a function.
        callbacks: Each a :class:`Callback`, or a function of ``(trainer, metrics)`` that is called
            after each step.
        flags: All flags of ``slime train`` by their names with underscores. ``eval_data`` is a
            path, rows, or a dict of these by name; ``generate`` and ``filter`` are functions. Flags
            that name functions take functions.

    Attributes:
        args: The resolved arguments.
        next_rollout: The number of the rollout that the next step trains.
        num_rollout: The number of rollouts of the whole run.

    Raises:
        ConfigError: With all problems of the arguments, files and functions at once, before
            anything is started.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        data: Data | None = None,
        reward: str | Callable[..., Any] | None = None,
        *,
        callbacks: Sequence[Listener] = (),
        **flags: Any,
    ) -> None:
        global current
        from slime.cluster.run import load_loop, open_run

        listeners = [as_callback(one) for one in callbacks]
        self._inputs = InputFolder()
        self.args = parse(
            {"model": model, "data": data, "reward": reward, **flags}, Path(self._inputs.name)
        )
        if current is not None:
            current.close()
        self.callbacks = listeners
        self.stopped = False
        self._loop = load_loop("train.py")
        # what is complete and was not told to the callbacks yet
        self._news: list[Callable[[Callback], None]] = []
        self._stack = contextlib.ExitStack()
        self._run: Run | None = self._stack.enter_context(open_run(self.args, in_program=True))
        current = self
        # After Ray's own handler was registered, which would otherwise run first.
        atexit.register(self.close)
        folder = self._run.log.display.run_dir
        assert folder is not None, "open_run creates the folder of the run"
        self._folder: RunDir = folder
        self._inode = self._folder.path.stat().st_ino
        self.next_rollout, self.num_rollout = self._run.first_rollout, self._run.num_rollout
        with self._working(self._run):
            self._run.update_weights()
        self._tell(lambda one: one.on_start(self))

    # --- the phases --------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """Do one iteration of the loop, and return its metrics.

        Raises:
            Closed: All ``num_rollout`` rollouts are trained, or the run was closed.
            KeyboardInterrupt: Ctrl-C; the run can go on.
        """
        run, rollout_id = self._open(), self.next_rollout
        if rollout_id >= self.num_rollout:
            raise Closed(f"all {self.num_rollout} rollouts are trained; give a larger num_rollout")
        saves = run.is_due(rollout_id, self.args.save_interval)
        # With --async-save, the folder gets this name once the snapshot is complete.
        folder = run.snapshots.folder_of(rollout_id) if saves else None
        with self._working(run):
            # An evaluation that Ctrl-C has interrupted belongs to the weights before this step.
            self._finish_evaluation(run)
            try:
                # A step is trained completely or not at all: Ctrl-C ends only the waits for
                # responses, of the rollout and of an evaluation.
                with run.stop.deferred():
                    self._loop.step(self.args, run, rollout_id)
            except StopRequested:
                if rollout_id in run.asked:
                    raise
                with run.stop.deferred():
                    run.end_step(rollout_id)
            self.next_rollout = rollout_id + 1
            metrics = dict(run.log.last_step)
            self._news.append(lambda one: one.on_step(self, metrics))
            if folder is not None:
                self._news.append(lambda one: one.on_save(self, folder))
            if run.is_due(rollout_id, self.args.eval_interval) and run.evaluation is None:
                self._evaluated(run)
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Evaluate all evaluation sets with the current weights, and return their metrics.

        Raises:
            ValueError: The run has no evaluation set; it goes on.
        """
        from slime.config.rollout import OWN_FUNCTIONS

        run, args = self._open(), self.args
        if (
            not (args.eval_prompt_data or args.eval_config)
            and args.eval_function_path in OWN_FUNCTIONS
        ):
            raise ValueError("there is nothing to evaluate: make the trainer with eval_data")
        with self._working(run):
            self._finish_evaluation(run)
            run.evaluate(self.next_rollout)
            self._evaluated(run)
        return dict(run.log.last_evaluation)

    def save(self) -> Path:
        """Write a snapshot, from which a run with ``load=`` continues; returns its folder.

        It is in the folder ``save``, or else in ``checkpoints`` of the run's folder.

        Raises:
            ValueError: No step was trained yet.
        """
        run = self._open()
        if run.trainer.trained is None:
            raise ValueError("there is nothing to save: no step was trained yet")
        run.snapshots.folder = run.snapshots.folder or self._folder.checkpoints
        shares_memory = run.trainer.colocated
        with self._working(run), run.stop.deferred():
            if shares_memory:
                run.offload_engines()
            run.save(run.trainer.trained)
            run.snapshots.commit()
            if shares_memory:
                run.update_weights()  # The trainer goes to sleep again, and the engines wake up.
            folder = self.checkpoints[-1]
            self._news.append(lambda one: one.on_save(self, folder))
        return folder

    def run(self) -> None:
        """Train all rollouts that are left: the loop of train.py, until :meth:`stop` is called."""
        run = self._open()
        if self.next_rollout == run.first_rollout and run.evaluates_at_start():
            self.evaluate()
        while self.next_rollout < self.num_rollout and not self.stopped:
            self.step()
        self.finish()

    def stop(self) -> None:
        """Let :meth:`run` and :func:`slime.train` end after the current step; for callbacks."""
        self.stopped = True

    def finish(self) -> None:
        """Close the ledger and print the summary. The engines still answer, but no further step can
        be taken.

        With ``save_interval``, a run that ends before its last rollout is saved here, as at the end
        of every run.
        """
        self._finish(saves=True)

    def _finish(self, saves: bool) -> None:
        from slime.cluster.run import complete

        run = self._open()
        if run.completed:
            return
        if (
            saves
            and self.args.save_interval
            and run.trainer.trained not in (None, run.snapshots.newest)
        ):
            self.save()
        self.num_rollout = self.next_rollout
        with self._working(run):
            complete(run)
        self._tell(lambda one: one.on_end(self))

    # --- results -----------------------------------------------------------------------------

    def sample(
        self, prompts: Prompt | Sequence[Prompt], n: int = 1, **sampling: object
    ) -> list[Sample] | list[list[Sample]]:
        """Generate ``n`` responses with the current weights; returns samples with token ids and
        log-probs.

        Args:
            prompts: One prompt, or a list of prompts. Each is a text, which is sent as it is, or a
                list of messages, which the chat template renders.
            sampling: Sampling parameters that differ from the run's: ``temperature``,
                ``max_new_tokens``, ``top_p``.

        Returns:
            The samples of the prompt; for a list of prompts, a list of these.

        Raises:
            ValueError: A prompt or a parameter is wrong; the run goes on.
        """
        from slime.cluster.rollout_manager import RolloutManager

        run = self._open()
        asked = check_prompts(prompts, n, sampling)
        with self._working(run):
            made = run.manager.call(
                "responses to prompts", RolloutManager.complete, asked, n, sampling
            )
        if isinstance(made, str):
            raise ValueError(made)
        return made[0] if is_single(prompts) else made

    def generate(self, prompts: Prompt | Sequence[Prompt], n: int = 1, **sampling: object) -> Any:
        """Do the same as :meth:`sample`, but return texts: one for a prompt, a list for more
        prompts or ``n > 1``.
        """
        single = is_single(prompts)
        asked: Any = [prompts] if single else prompts
        made: Any = self.sample(asked, n, **sampling)
        texts = [[sample.response for sample in group] for group in made]
        answers = [group[0] if n == 1 else group for group in texts]
        return answers[0] if single else answers

    @property
    def is_open(self) -> bool:
        """Whether the processes of the run are there."""
        return self._run is not None

    @property
    def folder(self) -> Path:
        """The folder of the run, with its metrics, samples and logs. A later run of the same name
        renames it.
        """
        return self._files.path

    @property
    def history(self) -> Table:
        """The metrics of the steps so far, one row each; a resumed run includes the steps
        before.
        """
        return self._rows("rollout/step")

    @property
    def evaluations(self) -> Table:
        """The metrics of the evaluations so far, one row each."""
        return self._rows("eval/step")

    @property
    def checkpoints(self) -> list[Path]:
        """The complete snapshots of the run, the newest last."""
        from slime.cluster.folders import snapshots_of

        files = self._files
        before = self._folder.path
        folder = Path(self.args.save) if self.args.save else files.checkpoints
        if files.path != before and folder.is_relative_to(before):
            folder = files.path / folder.relative_to(before)
        return snapshots_of(folder)

    @property
    def _files(self) -> RunDir:
        """The folder under its present name, which is found by its inode."""
        from slime.observability.run_dir import RunDir

        path = self._folder.path
        for place in (path, *path.parent.glob(f"{glob.escape(path.name)}.*")):
            if place.is_dir() and place.stat().st_ino == self._inode:
                return RunDir(place)
        return self._folder

    def _rows(self, key: str) -> Table:
        from slime.observability.metrics import read_metrics

        file = self._files.metrics
        return Table(row for row in (read_metrics(file) if file.is_file() else []) if key in row)

    # --- the end -----------------------------------------------------------------------------

    def close(self, save: bool = True) -> None:
        """End all processes of the run; metrics and files stay. Safe to call twice.

        Args:
            save: Whether a run with ``save_interval`` is saved first. At the end of a ``with``
                block it is not after an error, since the newest weights may be what went wrong.
        """
        from slime.cluster.run import save_while_generating

        run = self._run
        if run is None:
            return
        if run.asked and not run.completed:
            # A rollout is still being generated after Ctrl-C, so the ledger cannot be closed.
            with self._working(run), run.stop.deferred():
                told = run.snapshots.newest  # by step(), also if it is still being written
                if save:
                    save_while_generating(run)
                else:
                    run.snapshots.commit()
                if (saved := run.snapshots.saved) not in (None, told):
                    folder = run.snapshots.folder_of(saved)
                    self._news.append(lambda one: one.on_save(self, folder))
            run.completed = True
            run.log.display.finish()
            self._tell(lambda one: one.on_end(self))
        self._finish(save)
        self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(save=kind is None)

    def _end(self, error: BaseException | None) -> None:
        """Leave ``open_run``; an error of a phase is already on its way to the caller."""
        global current
        self._run = None
        if current is self:
            current = None
        atexit.unregister(self.close)
        try:
            if error is None:
                self._stack.close()
            else:
                with contextlib.suppress(type(error)):
                    self._stack.__exit__(type(error), error, error.__traceback__)
        finally:
            self._inputs.cleanup()

    # --- inside ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _working(self, run: Run) -> Iterator[None]:
        """A block in which Ctrl-C is a request that waits obey; it leaves the run open. Any error
        closes the run.

        At its end the callbacks hear of what it has completed, also if Ctrl-C ended it."""
        run.stop.forget()
        try:
            with run.stop:
                yield
        except StopRequested:
            pass
        except BaseException as error:
            self._end(error)
            raise
        # Callbacks run outside of the block, where Ctrl-C has its usual meaning again.
        interrupted = run.stop.requested is not None
        run.stop.forget()
        news = self._news
        self._news = []
        for what in news:
            self._tell(what)
        if interrupted:
            raise KeyboardInterrupt

    def _finish_evaluation(self, run: Run) -> None:
        """Wait for the evaluation in progress; Ctrl-C leaves it in progress."""
        if run.finish_evaluation():
            self._evaluated(run)

    def _evaluated(self, run: Run) -> None:
        metrics = dict(run.log.last_evaluation)
        self._news.append(lambda one: one.on_evaluate(self, metrics))

    def _open(self) -> Run:
        if self._run is None:
            raise Closed(
                "the processes of this run have ended; a new one with load= goes on from a snapshot"
            )
        return self._run

    def _tell(self, what: Callable[[Callback], None]) -> None:
        for one in self.callbacks:
            what(one)
