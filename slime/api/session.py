"""The primitives of training, for a program that writes its own loop."""

from __future__ import annotations

import atexit
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from slime.algorithms.token_losses import TOKEN_LOSSES
from slime.api import trainer as trainers
from slime.api.arguments import InputFolder, Prompt, check_prompts, is_single, parse
from slime.api.futures import ForwardBackward, Future, LossFunction, Refused, dpo
from slime.cluster.actors import Ref, door
from slime.cluster.stop_signals import StopRequested
from slime.config.layout import ParallelLayout
from slime.data.datum import Datum, check_data, parts_of_data
from slime.data.schedule import PackingSettings
from slime.registry import parts
from slime.types import AdamSettings

if TYPE_CHECKING:
    from torch import Tensor

    from slime.cluster.phases import Run
    from slime.cluster.train_group import TrainGroup
    from slime.data.fields import Wire
    from slime.data.sample import Sample

T = TypeVar("T")
_STATE = "session.json"


class Session:
    """A trainer and engines that do what a program tells them, call by call.

    Gradients accumulate over :meth:`forward_backward` until :meth:`optim_step`; how data are
    packed, divided and computed is settled by the flags, as in a run. The engines hold the weights
    of the last :meth:`save_weights_for_sampling`. A process has one open session, run or trainer at
    a time.

    Args:
        model: A Hugging Face folder or hub id.
        flags: Flags of ``slime train`` with underscores, without those of data, rewards and the
            loop.

    Raises:
        ConfigError: With all problems of the arguments at once, before anything is started.
        Refused: The flags ask for Megatron or a critic.
    """

    def __init__(self, model: str | Path, **flags: Any) -> None:
        from slime.cluster.run import open_run

        self._inputs = InputFolder()
        # A session has no prompts of its own, but the parts of a run want some.
        own = {
            "data": ["-"],
            "reward": _no_reward,
            "rollout_batch_size": 1,
            "n_samples_per_prompt": 2,
            "num_rollout": 1,
            # The program may sample and train at the same time, so neither makes room.
            "offload": False,
            "offload_train": False,
            "offload_rollout": False,
        }
        if doubled := sorted(own.keys() & flags.keys()):
            raise Refused(
                f"a session has no {', '.join(doubled)}: the program has its own loop, and may "
                "sample and train at the same time"
            )
        if flags.get("train_backend") == "megatron":
            raise Refused(
                "a session trains with --train-backend fsdp: Megatron's schedules run the forward "
                "and backward passes of a whole step, and add the gradients of one step only"
            )
        settings = {"model": model, "train_backend": "fsdp", **flags, **own}
        self.args = parse(settings, Path(self._inputs.name))
        if self.args.use_critic:
            raise Refused(f"a session has no critic: {self.args.advantage_estimator} needs one")
        if trainers.current is not None:
            trainers.current.close()
        self.steps = 0
        """The number of optimizer steps so far."""
        self._prompts = 0  # how many prompts were sampled; numbers their seeds
        self._accumulated = False
        self._sampling: list[Future[Any]] = []
        self._stack = contextlib.ExitStack()
        self._run: Run | None = self._stack.enter_context(open_run(self.args, in_program=True))
        self._layout = ParallelLayout.from_args(self._run.args)
        trainers.current = self
        atexit.register(self.close)  # after Ray's own handler, which would otherwise run first
        with self._obeying(self._run) as run:
            run.update_weights()
        self._updates = 0
        self._unsent = False  # whether the weights have changed since the last update

    # --- training ----------------------------------------------------------------------------

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: str | LossFunction = "policy_loss",
        *,
        divisor: float | None = None,
        **options: float,
    ) -> Future[ForwardBackward]:
        """Compute a loss and add its gradients to those of earlier calls.

        Args:
            loss: A sum over tokens (``cross_entropy``, ``importance_sampling``, ``ppo``, ``cispo``,
                ``dro``; see :mod:`slime.algorithms.token_losses`); ``policy_loss``, the loss of the
                flags, or the name of an estimator, with the advantages of the data; ``dpo``, with
                data in pairs; or a function of the log-probs.
            divisor: By what ``policy_loss`` and estimators divide their sum over the data (over
                tokens, with ``calculate_per_token_loss``). None: by the number in this call. With
                several calls before a step, it is the number in all of them.
            options: Numbers of the loss: ``clip_low_threshold``, ``clip_high_threshold`` of ``ppo``
                and ``cispo``, ``beta`` of ``dro`` and ``dpo``.

        Raises:
            ValueError: The data or the loss are wrong; nothing was computed.
        """
        from slime.cluster.train_actor import TrainActor

        if loss == "dpo":
            loss = dpo(**options)
            options = {}
        if callable(loss):
            return self._custom(data, loss)
        masked = loss not in TOKEN_LOSSES
        estimators = () if loss == "policy_loss" else parts("algorithm")
        if masked and loss != "policy_loss" and loss not in estimators:
            known = ", ".join((*TOKEN_LOSSES, "dpo", "policy_loss", *estimators))
            raise Refused(f"there is no loss {loss!r}: choose one of {known}, or give a function")
        known_options = () if masked else TOKEN_LOSSES[loss][1]
        if wrong := sorted(options.keys() - set(known_options)):
            raise Refused(f"the loss {loss} has no {', '.join(wrong)}")
        if divisor is not None and not masked:
            raise Refused(f"the loss {loss} is a sum, which nothing divides: leave out the divisor")
        if loss == "cross_entropy":
            check_data(data, ())
            data = [replace(datum, advantages=None) for datum in data]
        else:
            check_data(data, ("advantages",) if masked else ("advantages", "log_probs"))
        batches, order = self._parts(data, masked, divisor if masked else 1.0)
        refs = self._actor.start_on_parts(TrainActor.forward_backward, batches, loss, options)
        self._accumulated = True
        return Future(
            self,
            refs,
            lambda of_ranks: ForwardBackward(
                (of_ranks[0][0], order([log_probs for _, log_probs in of_ranks]))
            ),
        )

    def _custom(self, data: Sequence[Datum], loss: LossFunction) -> Future[ForwardBackward]:
        """Compute the gradient of a function of the log-probs, in two passes.

        The gradient for the weights is that of the sum of the log-probs, each multiplied by the
        derivative of the loss for it.
        """
        import torch

        log_probs = [x.requires_grad_() for x in self.forward(data).result()]
        value, metrics = loss(data, log_probs)
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise Refused("the function must return a loss with one element and a gradient")
        value.backward()
        linear = [
            Datum(
                datum.tokens,
                weights=[0.0] * datum.length if x.grad is None else (-x.grad).tolist(),
                group=datum.group,
            )
            for datum, x in zip(data, log_probs, strict=True)
        ]
        future = self.forward_backward(linear, "cross_entropy")
        found = {"loss": float(value.detach()), **{k: float(v) for k, v in metrics.items()}}
        read = future.read
        future.read = lambda results: ForwardBackward((found, read(results).log_probs))
        return future

    def optim_step(self, settings: AdamSettings | None = None) -> Future[dict[str, float]]:
        """Update the weights with the accumulated gradients, and drop these.

        Args:
            settings: None for the flags (``lr``, ``adam_beta1``, ``clip_grad``, …).

        Returns:
            ``grad_norm``, before it is clipped, and ``lr``.

        Raises:
            ValueError: There are no gradients.
        """
        from slime.cluster.train_actor import TrainActor

        if not self._accumulated:
            raise Refused("there are no gradients: optim_step comes after forward_backward")
        self._accumulated = False
        self.steps += 1
        self._unsent = True
        return Future(
            self, self._actor.start(TrainActor.optim_step, settings), lambda of_ranks: of_ranks[0]
        )

    def forward(self, data: Sequence[Datum], temperature: float = 1.0) -> Future[list[Tensor]]:
        """Return, for each datum, the log-probs of its scored tokens, float32.

        Args:
            temperature: The logits are divided by it.
        """
        from slime.cluster.train_actor import TrainActor

        check_data(data, ())
        batches, order = self._parts(data, False, None)
        refs = self._actor.start_on_parts(TrainActor.forward, batches, temperature)
        return Future(self, refs, order)

    # --- sampling ----------------------------------------------------------------------------

    def sample(
        self,
        prompts: Prompt | Sequence[Prompt],
        n: int = 1,
        *,
        version: str | None = None,
        **sampling: object,
    ) -> Future[Any]:
        """Generate ``n`` responses with the engines' weights.

        The prompts of a session are numbered in the order of the calls. With ``deterministic``, a
        response depends on the weights, the number of its prompt, its place among the ``n``, and
        ``rollout_seed``: a run that takes the same prompts in the same order has the same ones.

        Args:
            prompts: One prompt, or a list of prompts, each a text or a list of messages.
            version: What :meth:`save_weights_for_sampling` returned, to make sure that these are
                the weights.
            sampling: Sampling parameters in place of the flags: ``temperature``,
                ``max_new_tokens``, ``top_p``.

        Returns:
            The samples of the prompt; for a list of prompts, a list of these.

        Raises:
            ValueError: A prompt or a parameter is wrong, or the engines hold another version.
        """
        from slime.cluster.rollout_manager import RolloutManager

        run = self._open()
        if version is not None and version != self.version:
            raise Refused(f"the engines hold the weights {self.version}, not {version}")
        asked = check_prompts(prompts, n, sampling)
        first = self._prompts
        self._prompts += len(asked)
        ref = run.manager.start(RolloutManager.complete, asked, n, sampling, first, "sampling")

        def read(results: list[list[list[Sample]] | str]) -> Any:
            made = results[0]
            if isinstance(made, str):
                raise Refused(made)
            return made[0] if is_single(prompts) else made

        future = Future(self, [ref], read)
        self._sampling = [one for one in self._sampling if not one.done()] + [future]
        return future

    @property
    def version(self) -> str:
        """The name of the weights that the engines hold."""
        return self._open().pool.clock.version

    def save_weights_for_sampling(self) -> str:
        """Bring the weights to the engines, and return their version.

        It waits for all earlier calls.
        """
        run = self._open()
        for future in self._sampling:
            self.wait(future.refs)
        self._sampling = []
        if self._unsent:
            # a version is never used twice, also if load_state has gone back
            run.trainer.trained = self._updates
            self._updates += 1
            with self._obeying(run):
                run.update_weights()
            self._unsent = False
        return self.version

    # --- state -------------------------------------------------------------------------------

    def save_state(self, path: str | Path) -> Path:
        """Write weights, optimizer and counters into a folder; returns it.

        Raises:
            ValueError: There are gradients that no step has used.
        """
        if self._accumulated:
            raise Refused("gradients are no part of a state: call optim_step before save_state")
        folder = Path(path).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        with self._obeying(self._open()) as run:
            self._actor.save(folder)
            run.snapshots.commit()
        state = {"steps": self.steps, "prompts": self._prompts}
        (folder / _STATE).write_text(json.dumps(state))
        return folder

    def load_state(self, path: str | Path) -> None:
        """Go on from a folder of :meth:`save_state`, and drop all gradients. The engines keep their
        weights until :meth:`save_weights_for_sampling`.

        Raises:
            ValueError: The folder has no state.
        """
        from slime.cluster.train_actor import TrainActor

        folder = Path(path).absolute()
        if not (folder / _STATE).is_file():
            raise Refused(f"{folder} has no {_STATE}: save_state did not finish there")
        state = json.loads((folder / _STATE).read_text())
        self.wait(self._actor.start(TrainActor.load, folder / "actor"))
        self._accumulated = False
        self.steps = state["steps"]
        self._prompts = state["prompts"]
        self._unsent = True

    def save_hf(self, path: str | Path) -> Path:
        """Write the weights as a Hugging Face folder, or an adapter in PEFT's files."""
        with self._obeying(self._open()):
            self._actor.save_hf(Path(path).absolute())
        return Path(path)

    def on_backend(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function with the training backend, and the arguments after it, on the thread of
        the training rank, after the calls before. The session must be inline.
        """
        from slime.cluster.train_actor import TrainActor

        refs = self._actor.start(TrainActor.on_backend, call, *arguments)
        return Future(self, refs, lambda of_ranks: of_ranks[0])

    @property
    def engines(self) -> list[str]:
        """The addresses of the engines; this process may send them requests."""
        return self._open().pool.urls

    # --- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """End all processes of the session. Safe to call twice."""
        if self._run is None:
            return
        self._run.completed = True  # no ledger and no summary
        self._run.log.display.finish()
        self._run = None
        trainers.current = None
        atexit.unregister(self.close)
        try:
            self._stack.close()
        finally:
            self._inputs.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside ------------------------------------------------------------------------------

    def _parts(
        self, data: Sequence[Datum], masked: bool, divisor: float | None
    ) -> tuple[list[Ref[Wire]], Callable[[list[list[Tensor]]], list[Tensor]]]:
        """Return the parts of the data-parallel ranks, and a function that brings what all ranks
        have computed for their samples into the order of the data.
        """
        wires = list(
            parts_of_data(
                PackingSettings.from_args(self.args),
                self._layout,
                data,
                masked=masked,
                divisor=divisor,
            )
        )

        def order(results: list[list[Tensor]]) -> list[Tensor]:
            found = {
                int(place): x
                for rank, values in enumerate(results)
                for place, x in zip(
                    wires[self._layout.data_rank(rank)]["partition"], values, strict=True
                )
            }
            return [found[i] for i in range(len(data))]

        return [door().put(wire) for wire in wires], order

    def wait(self, refs: Sequence[Ref[T]]) -> list[T]:
        """Wait for calls of actors."""
        with self._obeying(self._open()) as run:
            return run.manager.waiter.get(refs, "a call of the session", self.args.phase_timeout)

    @contextlib.contextmanager
    def _obeying(self, run: Run) -> Iterator[Run]:
        """A block in which Ctrl-C ends waits with KeyboardInterrupt."""
        run.stop.forget()
        try:
            with run.stop:
                yield run
        except StopRequested:
            raise KeyboardInterrupt from None

    def _open(self) -> Run:
        if self._run is None:
            raise RuntimeError("the session was closed")
        return self._run

    @property
    def _actor(self) -> TrainGroup:
        actor = self._open().trainer.actor
        assert actor is not None, "a session trains"
        return actor


def _no_reward(sample: Any) -> float:
    """The program computes its rewards."""
    return 0.0
