"""The driver and its actors: placement, training ranks, rollout manager, engines, deadlines,
fault handling.
"""

import os
from pathlib import Path

# A private cluster must only listen on the loopback interface. By default, Ray resolves a loopback
# address to the host's public one and listens on all interfaces. Turning off
# RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER prevents that, on Linux too. Ray reads the variable when it is
# first imported, and other libraries may import it, so it is set here.
if not os.environ.get("RAY_ADDRESS"):
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
elif (Path.home() / ".ray" / "auth_token").exists():
    # `ray start` requires the token as soon as the file exists, but a joining driver only sends it
    # in this mode.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
