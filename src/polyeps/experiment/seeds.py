"""Random numbers of an experiment: one stream for each purpose, all from one seed."""

from __future__ import annotations

import numpy as np


def generator(seed: int, purpose: str) -> np.random.Generator:
    """Return a random generator for one purpose, so that drawing more for one leaves the others as they were."""
    return np.random.default_rng(seed_for(seed, purpose))


def seed_for(seed: int, purpose: str) -> int:
    return int(np.random.SeedSequence([seed, *purpose.encode()]).generate_state(1, np.uint32)[0])
