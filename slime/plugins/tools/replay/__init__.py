"""Compute a recorded training step again, and compare it with the run (``slime replay``)."""
