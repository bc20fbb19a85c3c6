"""Seeds of random generators from names and numbers, so that no draw depends on what was drawn before."""

import hashlib


def seed_of(*parts: int | str) -> int:
    """Return a seed for torch's generators, 0 to 2^63 - 1, that follows from these words and numbers."""
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
