"""Documented import path of the loss masks of conversations; the code is in
:mod:`slime.data.masks`.
"""

from slime.data.masks import MultiTurnLossMaskGenerator

__all__ = ["MultiTurnLossMaskGenerator"]
