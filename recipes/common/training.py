"""The trainings of the recipes' models, by the code of `quartet sft` and `quartet reward-model`."""

import asyncio
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers.utils import logging

from orchestrator.commands.supervised import TrainingFile, fit
from orchestrator.monitoring.progress import PlainProgress
from orchestrator.supervised.registry import TRAININGS
from quartet.models.device import default_device
from recipes.common.build import write_rows

THREADS = 2
"""Enough for models this small: more threads wait for one another longer than they work."""


def train(
    command: str, base: Path, rows: Iterable[Mapping[str, str]], save: Path, rate: float, **fields: Any
) -> None:
    """Trains a model.

    Args:
        command: name of the training, such as sft.
        base: folder of the model to start from.
        rows: the examples, in the order in which they are taken.
        save: folder of the trained model.
        rate: peak learning rate; it rises over 20 steps at most, then falls along a half cosine.
        fields: others of the training's file.
    """
    with TemporaryDirectory() as work:
        data, rows = Path(work) / "train.jsonl", list(rows)
        write_rows(data, rows)
        steps = len(rows) * fields.get("epochs", 1) // fields["batch_size"]
        optimizer = {
            "learning_rate": rate,
            "betas": [0.9, 0.999],
            "weight_decay": 0.01,
            "warmup_steps": min(20, steps // 4),
        }
        own = {
            "name": command,
            "model": str(base),
            "save": str(save),
            "optimizer": optimizer | {"schedule": "cosine", "final_fraction": 0.05},
            "packing": True,
            "checkpoint": {"every": 0},
            "log": {"tensorboard": False},
        }
        section = {"path": str(data)} | fields.pop("data", {})
        file = TrainingFile(TRAININGS[command].parse(own | {"data": section} | fields, command), own)
        asyncio.run(fit(file, PlainProgress(io.StringIO()), run_dir=Path(work) / "run"))


def quiet_and_seeded(seed: int) -> None:
    """Fixes torch's seed and threads, and keeps transformers from drawing bars for files of a megabyte.

    If OMP_NUM_THREADS is set, torch's threads are left as it says.
    """
    if default_device().type != "cuda":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would warn that there is no other
    torch.manual_seed(seed)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(THREADS, os.cpu_count() or 1))
    logging.disable_progress_bar()
