"""Threads on the CPU."""

import pytest
import torch

from services.common.models.device import cpu_threads


def test_threads_are_changed_for_a_while_only() -> None:
    before = torch.get_num_threads()
    with cpu_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(KeyError), cpu_threads(before + 1):
        raise KeyError
    assert torch.get_num_threads() == before
    with cpu_threads(None):
        assert torch.get_num_threads() == before
