"""Killable processes for verifiers, which can hang. See :mod:`slime.rollout.verifier.pool`."""
