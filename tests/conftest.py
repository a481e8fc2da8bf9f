"""What every test starts from: known random numbers, and threads as they were."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _known_state():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_thread(_known_state):
    """For thousands of calls on small tensors, where threads mostly wait for each other."""
    torch.set_num_threads(1)
