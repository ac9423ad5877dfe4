"""Documented import paths of the agents; the code is in :mod:`slime.plugins.agents`."""
