"""Megatron's optimizer, distributed or not, with its scheduler of learning rate and weight decay.

:class:`StreamedGradients` is the step of a distributed optimizer without a float32 copy of all
gradients, also for main parameters on the CPU. With ``--optimizer-cpu-offload``, main parameters
and moments are in CPU memory. megatron-core's own ``HybridDeviceOptimizer`` is not used for this,
because it offloads nothing unless a fraction is given, keeps each gradient until the next call of
``step``, and cannot load a state whose main parameters are float32. Here torch's Adam remains the
inner optimizer. :func:`offload_main_parameters` replaces a fraction of the float32 main parameters
by tensors in CPU memory before the first step, so that their moments are created there, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import clip_grads, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import local_multi_tensor_l2_norm
from torch import Tensor

from slime.backends.lr_schedule import LrSchedule, planned_steps
from slime.backends.offload import host_tensors
from slime.config.args import Args
from slime.plugins.megatron.config import DTYPES, optimizer_config


class ScheduledOptimizer:
    """The optimizer of one rank.

    A step is a call of :meth:`grad_norm` followed by one of :meth:`step`, which clips the
    gradients, updates the parameters and sets the learning rate of the next step.
    """

    def __init__(self, args: Args, role: str, chunks: list[DistributedDataParallel]) -> None:
        # Megatron's optimizer; with an offload, part of its main parameters and moments are in CPU
        # memory.
        given = args.megatron
        schedule = LrSchedule.from_args(args, role)
        dtype = DTYPES[args.train_dtype]
        config = optimizer_config(given, args, dtype, schedule)
        self.chained = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
        offloads = bool(given.get("optimizer_cpu_offload"))
        if offloads:
            fraction = _or(given.get("optimizer_offload_fraction"), 1.0)
            for one in self.chained.chained_optimizers:
                offload_main_parameters(one, fraction)
        if torch.cuda.is_available():
            # Megatron's default would take as much memory again as the moments
            for group in self.chained.param_groups:
                group.update(fused=True, foreach=False)
        # Megatron would copy all bfloat16 gradients to float32 at once, and it cannot copy
        # gradients to main parameters in CPU memory. In both cases, slime processes the gradients
        # piece by piece.
        in_bf16 = given.get("grad_reduce_in_bf16") and dtype == torch.bfloat16
        streamed = offloads or bool(in_bf16 and given.get("use_distributed_optimizer", True))
        self.streamed = (
            [StreamedGradients(one) for one in self.chained.chained_optimizers] if streamed else []
        )
        self.clip_grad = args.clip_grad
        self.steps = self._steps_since_reset = 0
        # Megatron's scheduler counts steps of one sample here, which is the same if all steps have
        # one size.
        increase = given.get("weight_decay_incr_style") or "constant"
        self.scheduler = OptimizerParamScheduler(
            self.chained,
            init_lr=schedule.warmup_init,
            max_lr=schedule.max_lr,
            min_lr=schedule.min_lr,
            lr_warmup_steps=schedule.warmup_steps,
            # Megatron asserts that the decay is longer than the warm-up, even for a rate that is
            # constant afterwards.
            lr_decay_steps=max(schedule.decay_steps, schedule.warmup_steps + 1),
            lr_decay_style=schedule.style,
            start_wd=_or(given.get("start_weight_decay"), args.weight_decay),
            end_wd=_or(given.get("end_weight_decay"), args.weight_decay),
            # Over the whole run, as in Megatron, also if the learning rate decays in fewer steps.
            wd_incr_steps=schedule.decay_steps
            if increase == "constant"
            else planned_steps(args, role),
            wd_incr_style=increase,
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=False,
            wsd_decay_steps=schedule.wsd_decay_steps,
            lr_wsd_decay_style=schedule.wsd_style,
        )

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(next((group["lr"] for group in self.chained.param_groups), 0.0))

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Return the norm of the gradients of all ranks, and prepare them for :meth:`step`.

        This is a collective operation.
        """
        if self.streamed:
            return math.sqrt(sum(one.squared_norm() for one in self.streamed))
        self.chained.prepare_grads()
        return float(self.chained.get_grad_norm())

    @torch.no_grad()
    def step(self, norm: float) -> float:
        """Update the parameters, and return the learning rate of this step.

        Args:
            norm: The result of :meth:`grad_norm`, by which gradients are clipped.
        """
        used = self.lr
        # grad_norm has computed the norm over all ranks. Clipping here only multiplies the
        # gradients, so a step has no second collective for it.
        factor = min(self.clip_grad / (norm + 1e-6), 1.0) if self.clip_grad > 0 else 1.0
        for one in self.streamed:
            one.step(factor)
        if factor < 1.0 and not self.streamed:
            parameters = [
                x
                for optimizer in self.chained.chained_optimizers
                for x in optimizer.get_parameters()
            ]
            if gradients := [x.grad for x in parameters if x.grad is not None]:
                torch._foreach_mul_(gradients, factor)
        self.chained.step_with_ready_grads()
        self.steps += 1
        self._steps_since_reset += 1
        self.scheduler.step(increment=1)
        return used

    def reset(self) -> None:
        """Set the moments and the counts of steps to 0 (``--reset-optimizer-states``), but not the
        main parameters.
        """
        self._steps_since_reset = 0
        for state in self.states():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()

    def prime(self) -> None:
        """Create moments of 0 if there were no steps yet, because Megatron's state dicts require
        that they exist.
        """
        for optimizer in self._inner():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if not optimizer.state[parameter]:
                        zeros = {
                            name: torch.zeros_like(parameter.data)
                            for name in ("exp_avg", "exp_avg_sq")
                        }
                        optimizer.state[parameter].update(step=_step(group, parameter), **zeros)

    def adam_steps(self) -> int:
        """Return the number of steps for Adam's bias correction: those since the start or the last
        :meth:`reset`.
        """
        counts = {int(state["step"]) for state in self.states() if "step" in state}
        assert len(counts) <= 1, (
            f"the parameters have different numbers of optimizer steps: {sorted(counts)}"
        )
        # all parameters of this rank are frozen
        return counts.pop() if counts else self._steps_since_reset

    def set_adam_steps(self, steps: int) -> None:
        """Set the number of steps for Adam's bias correction. Every parameter gets its own tensor,
        because torch's Adam would increment a shared tensor once for each parameter."""
        self._steps_since_reset = steps
        for optimizer in self._inner():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter)
                    if state and "exp_avg" in state:
                        state["step"] = _step(group, parameter).fill_(float(steps))

    def _inner(self) -> list[Any]:
        """Return torch's optimizers. Megatron has None if the rank has no parameters of a kind."""
        inner = [optimizer.optimizer for optimizer in self.chained.chained_optimizers]
        return [optimizer for optimizer in inner if optimizer is not None]

    def kept(self) -> list[dict[str, torch.Tensor]]:
        """Return each main parameter on this rank with its moments and its count of steps, in a
        fixed order.
        """
        groups = [(inner, group) for inner in self._inner() for group in inner.param_groups]
        return [
            {
                "parameter": p.detach(),
                **{n: x for n, x in inner.state[p].items() if isinstance(x, torch.Tensor)},
            }
            for inner, group in groups
            for p in group["params"]
        ]

    def set_steps(self, steps: int) -> None:
        """Set the number of completed steps, and the learning rate of the next step."""
        self.steps = steps
        self.scheduler.num_steps = 0
        self.scheduler.step(increment=steps)

    def states(self) -> list[dict[str, Any]]:
        """Return the state of every main parameter on this rank."""
        return [state for optimizer in self._inner() for state in optimizer.state.values()]

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that occupy memory besides the model: moments and main parameters."""
        moments = [
            x for state in self.states() for x in state.values() if isinstance(x, torch.Tensor)
        ]
        mains = [p for group in self.chained.param_groups for p in group["params"]]
        return [*moments, *(p.detach() for p in mains)]


def _l2_norm(
    chunk: int, flag: torch.Tensor, lists: list[list[torch.Tensor]], by_tensor: bool
) -> tuple[torch.Tensor, None]:
    """The norm of all tensors, ``[1]``. Without Transformer Engine and Apex, Megatron's own waits
    for the GPU once for each parameter."""
    return torch.stack(torch._foreach_norm(lists[0])).norm().view(1), None


if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
    clip_grads.l2_norm_impl = _l2_norm


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _step(group: Mapping[str, object], parameter: torch.Tensor) -> torch.Tensor:
    """Return a count of 0 on the device on which torch's Adam needs it."""
    return torch.zeros(
        (), dtype=torch.float32, device=parameter.device if group.get("fused") else "cpu"
    )


PIECE_BYTES = 2**30


class _Pair(NamedTuple):
    model: Tensor
    main: Tensor
    start: int
    end: int

    def gradient(self) -> Tensor:
        """Return the gradient as a view of the buffer, on the device of the model."""
        gradient: Tensor = self.model.main_grad  # type: ignore[attr-defined]
        return gradient.view(-1)[self.start : self.end]


class StreamedGradients:
    """Computes the gradient norm and the step of an optimizer piece by piece.

    Megatron copies all gradients of a ``--grad-reduce-in-bf16`` buffer to float32 at once, which
    takes another four bytes per parameter. Here the norm is that of the buffer, and one piece after
    the other is copied, used and freed for the step. While Adam computes a piece of main parameters
    in CPU memory (``--optimizer-cpu-offload``), the gradients of the next piece are copied to one of
    two pinned buffers, and the piece before is copied to the model. Megatron would convert those to
    bfloat16 on the CPU, into pageable memory, and wait for the copy of each.

    Args:
        optimizer: One of Megatron's distributed optimizers.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self.optimizer = optimizer
        self._host: dict[int, Tensor] = {}

    @property
    def pieces(self) -> list[list[_Pair]]:
        """Groups of parameters whose gradients are in float32 at the same time. They are computed
        again for each use, because loading a checkpoint may replace tensors."""
        return [] if self.optimizer.is_stub_optimizer else _pieces(self.optimizer)

    def squared_norm(self) -> float:
        """Return the squared norm of this optimizer's gradients over all ranks. This is a
        collective operation.
        """
        total = torch.zeros(
            1, device=torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        )
        for piece in self.pieces:
            gradients = [pair.gradient() for pair in piece if self._counts(pair.main)]
            if gradients:
                total += (
                    torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
                    .square()
                    .sum()
                )
        torch.distributed.all_reduce(total, group=self.optimizer.get_grad_stats_parallel_group())
        return float(total)

    def _counts(self, main: Tensor) -> bool:
        """Return whether a gradient counts on this rank, by Megatron's rule
        (``get_main_grads_for_grad_norm``): each parameter of the whole model counts once."""
        group = getattr(self.optimizer, "tp_group", None)
        return bool(param_is_not_shared(main)) and bool(
            param_is_not_tensor_parallel_duplicate(main, group)
        )

    def step(self, scale: float) -> None:
        """Update the main parameters with the gradients times ``scale``, and copy them to the
        parameters of the model.
        """
        for piece in self._in_turn(scale):
            self.optimizer.optimizer.step()
            for pair in piece:
                model = pair.model.detach().view(-1)[pair.start : pair.end]
                model.copy_(pair.main.to(model.device, non_blocking=True).view(-1))
        # Megatron would copy all of them again.
        self.optimizer._copy_main_params_to_model_params = lambda: None

    def _in_turn(self, scale: float) -> Iterator[list[_Pair]]:
        """Yield each piece while its main parameters have their gradients, on their own device. The
        copies for the next piece have started then.
        """
        pieces = self.pieces
        started = [self._start(piece, scale, 0) for piece in pieces[:1]]
        for number, piece in enumerate(pieces, start=1):
            gradients, copied = started.pop()
            started += [self._start(after, scale, number % 2) for after in pieces[number:][:1]]
            if copied is not None:
                copied.synchronize()
            for pair, gradient in zip(piece, gradients, strict=True):
                pair.main.grad = gradient
            yield piece
            for pair in piece:
                pair.main.grad = None

    def _start(
        self, piece: list[_Pair], scale: float, buffer: int
    ) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Return the gradients of a piece times ``scale``, and when those in CPU memory are there."""
        gradients = _scaled([pair.gradient() for pair in piece], scale)
        start = 0
        for place, pair in enumerate(piece):
            if gradients[place].device != pair.main.device:
                host = self._host_memory(piece, buffer)[start : start + pair.main.numel()]
                start += pair.main.numel()
                gradients[place] = host.copy_(gradients[place], non_blocking=True)
        return gradients, torch.cuda.current_stream().record_event() if start else None

    def _host_memory(self, piece: list[_Pair], buffer: int) -> Tensor:
        """Return one of two pinned float32 buffers for the gradients of a piece."""
        numel = sum(pair.main.numel() for pair in piece)
        if buffer not in self._host or self._host[buffer].numel() < numel:
            self._host[buffer] = torch.empty(numel, dtype=torch.float32, pin_memory=True)
        return self._host[buffer]


def _scaled(gradients: list[Tensor], scale: float) -> list[Tensor]:
    """Return gradients in float32 times ``scale``. The given tensors do not change, and are
    returned if they are those.

    One kernel converts many tensors: a conversion of each by itself takes twice as long on an H200.
    """
    if scale == 1.0 and all(x.dtype == torch.float32 for x in gradients):
        return gradients
    scaled = [torch.empty_like(x, dtype=torch.float32) for x in gradients]
    torch._foreach_copy_(scaled, gradients)
    if scale != 1.0:
        torch._foreach_mul_(scaled, scale)
    return scaled


@torch.no_grad()
def offload_main_parameters(optimizer: DistributedOptimizer, fraction: float) -> int:
    """Replace main parameters by copies in CPU memory.

    Args:
        optimizer: The optimizer, before its first step.
        fraction: The fraction of this rank's elements in ``optimizer`` to replace. Whole parameters
            are replaced, in order, until this fraction is reached.

    Returns:
        The number of elements that were replaced.
    """
    if optimizer.is_stub_optimizer:
        return 0
    groups = [*optimizer.shard_fp32_groups, *optimizer.shard_fp32_from_float16_groups]
    wanted = fraction * sum(main.numel() for group in groups for main in group)
    mains: list[Tensor] = []
    count = 0
    for main in (main for group in groups for main in group):
        if count < wanted:
            mains.append(main)
            count += main.numel()
    moved = {
        id(main): _copied(main, host) for main, host in zip(mains, host_tensors(mains), strict=True)
    }
    for group in groups:
        group[:] = [moved.get(id(main), main) for main in group]
    # Megatron keeps the groups from which it created torch's optimizer. They would keep the old
    # parameters in memory.
    made_from = [ranges["orig_group"] for ranges in optimizer.opt_group_ranges]
    for inner_group in [*optimizer.optimizer.param_groups, *made_from]:
        inner_group["params"] = [moved.get(id(main), main) for main in inner_group["params"]]
    for model_group in optimizer.model_float16_groups:
        for model in model_group:
            model.main_param = moved.get(id(model.main_param), model.main_param)
    return count


def _copied(main: Tensor, copy: Tensor) -> Tensor:
    """Copy a main parameter, with the attributes that Megatron's gradient norm needs."""
    copy.copy_(main)
    tensor_parallel.copy_tensor_model_parallel_attributes(copy, main)
    if hasattr(main, "shared"):
        copy.shared = main.shared  # type: ignore[attr-defined]
    return copy


def _pieces(optimizer: DistributedOptimizer) -> list[list[_Pair]]:
    models = [*optimizer.model_float16_groups, *optimizer.model_fp32_groups]
    mains = [*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups]
    pieces: list[list[_Pair]] = []
    size = PIECE_BYTES
    for model_group, main_group in zip(models, mains, strict=True):
        for model, main in zip(model_group, main_group, strict=True):
            if size >= PIECE_BYTES:
                pieces.append([])
                size = 0
            # A distributed optimizer has a flat range of each parameter, which may end within a
            # row.
            own = optimizer._get_model_param_range_map(model)["param"]
            pieces[-1].append(_Pair(model, main, own.start, own.end))
            size += 4 * own.size
    return pieces
