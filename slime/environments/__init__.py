"""Environments: ready-made tasks with their prompts, rewards and turns. See :mod:`slime.environments.base`."""
