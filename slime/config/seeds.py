"""Seeds. Every random choice has its own seed, derived from its purpose, so there is no global
generator whose state would depend on the order of calls."""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, purpose: str, *index: int) -> int:
    """Derive a 31-bit seed for one random choice. It is the same on every machine and in every
    Python version.

    >>> derive_seed(1, "shuffle", 0) == derive_seed(1, "shuffle", 0) != derive_seed(1, "shuffle", 1)
    True
    """
    text = "/".join([str(run_seed), purpose, *map(str, index)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1
