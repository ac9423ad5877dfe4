"""A task in which the model calls a tool between its turns."""
