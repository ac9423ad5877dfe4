"""Killable processes for verifiers, which can hang. See :mod:`slime.rollout.verifier.pool`."""

from slime.rollout.verifier.pool import Verdict, VerifierLoadError, VerifierPool, shared_pool

__all__ = ["Verdict", "VerifierLoadError", "VerifierPool", "shared_pool"]
