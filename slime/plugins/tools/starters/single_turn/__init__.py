"""A task with one response to each prompt."""
