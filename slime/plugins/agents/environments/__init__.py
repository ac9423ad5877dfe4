"""Environments: ready-made tasks with their prompts, rewards and turns. See :mod:`.base`."""
