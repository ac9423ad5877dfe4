"""A package of a stranger with one part of each kind. Nothing of it is imported before a run names
a part.
"""

from slime.registry import register


def parts() -> None:
    """Register the parts: the entry point of this package."""
    register(
        "algorithm",
        "share",
        "haiku_for_slime.algorithm:Share",
        flags="haiku_for_slime.algorithm:ShareFlags",
    )
    register("reward", "vowels", "haiku_for_slime.reward:VOWELS")
    register("environment", "counting", "haiku_for_slime.environment:make")
    register("backend", "counted", "haiku_for_slime.backend:Counted")
    register("engine", "scripted", "haiku_for_slime.engine:start")
    register("transport", "note", "haiku_for_slime.transport:NOTE")
    register("tracker", "lines", "haiku_for_slime.tracker:Lines")
    register("command", "haiku", "haiku_for_slime.command:add")
