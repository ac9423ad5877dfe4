"""The error of subcommands."""


class CommandError(Exception):
    """An error for the user, which is printed without a traceback. The message says what is wrong and what to do."""
