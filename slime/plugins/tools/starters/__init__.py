"""What ``slime init`` copies: one folder per kind of task, with the files of the user."""
