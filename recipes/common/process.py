"""Settings of the whole process that a recipe runs in."""

import os

import torch
from transformers.utils import logging

THREADS = 2
"""Enough for models this small: more threads wait for one another longer than they work."""


def quiet_and_seeded(seed: int) -> None:
    """Fixes torch's seed and threads, and keeps transformers from drawing bars for files of a megabyte.

    OMP_NUM_THREADS, where it is set, is the caller's word on threads and stays.
    """
    torch.manual_seed(seed)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(THREADS, os.cpu_count() or 1))
    logging.disable_progress_bar()
