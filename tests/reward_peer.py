"""TRL's RewardTrainer on given comparisons. Runs in the virtual environment that holds TRL, and imports nothing of
Quartet.

    python reward_peer.py < SETTINGS

SETTINGS is JSON: `model`, a folder; `rows` of token ids and a margin; `steps`, `batch`, `rate`, `centring` and
`output`. Prints the loss of each step as a line of JSON.
"""

import json
import sys
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl import RewardConfig, RewardTrainer


class InOrder(RewardTrainer):
    """The trainer, without the shuffling of rows."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)


class Losses(TrainerCallback):
    """Prints the loss of each step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Called after each step."""
        if logs and "loss" in logs:
            print(json.dumps({"loss": logs["loss"]}), flush=True)


def main(settings: dict[str, Any]) -> None:
    """Trains for `steps` steps."""
    torch.set_num_threads(1)
    folder = settings["model"]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    config = RewardConfig(
        output_dir=settings["output"],
        per_device_train_batch_size=settings["batch"],
        max_steps=settings["steps"],
        learning_rate=settings["rate"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        center_rewards_coefficient=settings["centring"],
        logging_steps=1,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        max_length=None,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    rows = Dataset.from_list(settings["rows"])
    InOrder(model, config, train_dataset=rows, processing_class=tokenizer, callbacks=[Losses()]).train()


if __name__ == "__main__":
    main(json.load(sys.stdin))
