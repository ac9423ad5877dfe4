"""What a subcommand raises for its user."""


class CommandError(Exception):
    """Printed as one message without a traceback: what was wrong, where, what to do."""
