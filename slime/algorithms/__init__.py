"""Estimators, KL, losses and corrections: pure functions of numbers and tensors, each with its
formula and its source.

A custom estimator derives from :class:`Algorithm` or from one of the built-in classes.
"""

from .algorithm import Algorithm as Algorithm
from .algorithm import EstimatorSettings as EstimatorSettings
