"""What the HTTP servers of slime share: which requests they refuse, how they check the fields of a
body, and how they answer.
"""


def parts() -> None:
    """Register nothing: the servers are parts of other plug-ins."""
