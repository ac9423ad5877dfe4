"""A task in which the model learns what a teacher says."""
