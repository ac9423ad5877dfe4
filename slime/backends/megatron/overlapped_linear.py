"""Linear layers of tensor parallelism with ``--tp-comm-overlap``: while matrices are multiplied, rows come from other
ranks, or results go to them.

With sequence parallelism each rank holds ``t = T / ranks`` of the ``T`` tokens between the layers. Gathering them
before a product, and summing and scattering them after one, keeps a GPU waiting for a quarter of a step. On CUDA each
product is computed in pieces, one for each rank, whose rows PyTorch's symmetric memory copies between the GPUs
meanwhile. On the CPU the same layers use plain collectives.
"""

from __future__ import annotations

import socket
from typing import ClassVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.autograd.function import once_differentiable

from slime.backends.megatron.core import MegatronError
from slime.models.autograd import Context, Gradients


class OverlappedColumn(ColumnParallelLinear):
    """A layer whose output features are divided among ranks, and that gathers the tokens while it multiplies."""

    def _forward_impl(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, sequence_parallel: bool, **options: object
    ) -> Tensor:
        if not sequence_parallel:
            return super()._forward_impl(input, weight, bias=bias, sequence_parallel=False, **options)
        output = GatheredLinear.apply(input, weight, self.tp_group)
        return output if bias is None else output + bias


class OverlappedRow(RowParallelLinear):
    """A layer whose input features are divided among ranks, and that scatters the tokens while it multiplies."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return this rank's tokens of the output, ``[t, 1, out]``, and the bias that the caller has to add."""
        if not self.sequence_parallel or self.explicit_expert_comm:
            return super().forward(input_)
        output = ScatteredLinear.apply(input_, self.weight, self.tp_group)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias, None


class GatheredLinear(torch.autograd.Function):
    """``gather(x) @ weight.T``. ``x`` is ``[t, 1, in]``, ``weight`` ``[out / ranks, in]``, the result
    ``[T, 1, out / ranks]``.

    The backward pass gathers ``x`` again, as Megatron does, so that each rank keeps only its own rows.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = (group,)
        return gather_and_multiply(x, weight.t(), group)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> Gradients:
        (x, weight), (group,) = ctx.saved_tensors, ctx.settings
        gathered = Gathering(x, group) if ctx.needs_input_grad[1] else None
        grad_x = multiply_and_scatter(grad, weight, group)
        return grad_x, None if gathered is None else _weight_gradient(grad, gathered.wait()), None


class ScatteredLinear(torch.autograd.Function):
    """``sum_and_scatter(x @ weight.T)``. ``x`` is ``[T, 1, in / ranks]``, ``weight`` ``[out, in / ranks]``, the result
    ``[t, 1, out]``."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.settings = (group,)
        return multiply_and_scatter(x, weight.t(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> Gradients:
        (x, weight), (group,) = ctx.saved_tensors, ctx.settings
        whole, grad_x = gather_and_multiply(grad, weight, group)
        return grad_x, _weight_gradient(whole, x) if ctx.needs_input_grad[1] else None, None


def gather_and_multiply(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the rows ``x`` ``[t, 1, in]`` of all ranks, ``[T, 1, in]``, and their product with ``weight``,
    ``[in, out]``."""
    if not x.is_cuda:
        whole = Gathering(x, group).wait()
        return whole, whole @ weight
    name = group.group_name
    whole, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(x.contiguous(), [weight], 0, name)
    return whole, product


def multiply_and_scatter(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's rows ``[t, 1, out]`` of the sum over ranks of ``x @ weight``: ``[T, 1, in] @ [in, out]``."""
    if x.is_cuda:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), weight, "sum", 0, group.group_name)
    product = x @ weight
    part = product.new_empty(len(product) // group.size(), *product.shape[1:])
    dist.reduce_scatter_tensor(part, product, group=group)
    return part


class Gathering:
    """The rows of all ranks, on their way to this one. On CUDA they are copied on a stream of their own."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup) -> None:
        """Start. ``x`` are this rank's rows ``[t, ...]``, which must not be changed before :meth:`wait`."""
        self.rows = x.contiguous()  # kept until they are copied
        self.whole = x.new_empty(len(x) * group.size(), *x.shape[1:])
        self.copies: Copies | None = None
        if x.is_cuda:
            self.copies = Copies.of(group)
            self.copies.start(self.rows, self.whole)
        else:
            dist.all_gather_into_tensor(self.whole, self.rows, group=group)

    def wait(self) -> Tensor:
        """Return the rows ``[T, ...]``, which later kernels of the current stream can read."""
        if self.copies is not None:
            torch.cuda.current_stream().wait_stream(self.copies.stream)
        return self.whole


class Copies:
    """The memory of a group of ranks from which each one copies the rows of the others, and the stream for that. No
    kernel but two short ones takes part, so the products of matrices keep their multiprocessors."""

    _of_group: ClassVar[dict[str, Copies]] = {}

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Copies:
        """Return the only one of a group."""
        name = group.group_name
        if name not in cls._of_group:
            cls._of_group[name] = cls(group)
        return cls._of_group[name]

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.stream = torch.cuda.Stream()
        self.memory: Tensor | None = None

    def start(self, x: Tensor, whole: Tensor) -> None:
        """Copy ``x``, and the same of the other ranks, to ``whole``."""
        from torch.distributed import _symmetric_memory as symmetric

        size = x.numel() * x.element_size()
        if self.memory is None or self.memory.numel() < size:  # on all ranks at once: their packs have the same tokens
            self.memory = symmetric.empty(size, dtype=torch.uint8, device=x.device)
        memory = symmetric.rendezvous(self.memory, self.group)
        parts = whole.chunk(memory.world_size)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            memory.get_buffer(memory.rank, x.shape, x.dtype).copy_(x)
            memory.barrier()
            for step in range(memory.world_size):
                rank = (memory.rank + step) % memory.world_size
                parts[rank].copy_(memory.get_buffer(rank, x.shape, x.dtype))
            memory.barrier()  # nobody reads this rank's memory from here on


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def require_one_node(group: dist.ProcessGroup) -> None:
    """Check that GPUs can read the memory of one another.

    Raises:
        MegatronError: The ranks of ``group`` are on several nodes.
    """
    hosts: list[str] = [""] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    if len(set(hosts)) > 1:
        raise MegatronError(
            f"--tp-comm-overlap: tensor-parallel ranks are on several nodes ({', '.join(sorted(set(hosts)))}), and "
            "GPUs copy from one another only within a node: lower --tensor-model-parallel-size, or leave the flag out"
        )
