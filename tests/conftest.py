"""What every test shares: one thread for torch, fresh but repeatable random numbers, and the skip without a GPU."""

import os
import secrets

# Sums come out the same bits only at equal thread counts, and processes that a test starts must count alike.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def rng() -> torch.Generator:
    """A generator with a fresh seed; pytest shows the seed with a failure, and DELTASPAN_SEED=<seed> repeats it."""
    seed = int(os.environ.get("DELTASPAN_SEED") or secrets.randbits(32))
    print(f"repeat with DELTASPAN_SEED={seed}")
    return torch.Generator().manual_seed(seed)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
