"""Documented import path of two helpers for off-policy corrections in the loss
(``--custom-tis-function-path``).

Without context parallelism, a rank has the whole response, and both return their input. With it, a
function that needs whole responses should name a parameter ``reduce`` instead, whose
``over_sequence`` sums over the ranks, as :func:`slime.algorithms.mis.compute_mis_weights` does.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["all_gather_with_cp", "slice_log_prob_with_cp"]


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int) -> Tensor:
    """Return the values of a whole response, ``[response_length]``.

    Raises:
        ValueError: ``tensor`` is only a rank's part of the response.
    """
    return _whole(tensor, response_length)


def slice_log_prob_with_cp(log_prob: Tensor, total_length: int, response_length: int) -> Tensor:
    """Return this rank's part of the values of a whole response, ``[response_length]``.

    Raises:
        ValueError: ``log_prob`` does not have one value per response token.
    """
    return _whole(log_prob, response_length)


def _whole(values: Tensor, response_length: int) -> Tensor:
    if len(values) != response_length:
        raise ValueError(
            f"{len(values)} values for a response of {response_length} tokens: these helpers need "
            "whole responses; use --context-parallel-size 1, or a function with a parameter "
            "`reduce` that sums over the ranks"
        )
    return values
