"""TRL's side of a race. Runs in the virtual environment that holds TRL, and imports nothing of Quartet.

    python peer.py SETTINGS

SETTINGS is JSON: a case, and on a GPU also `device`, the dtype of the `weights`, and how many responses go `forward`
at a time. Prints a line of JSON for each PPO update: its seconds, and the tokens of its responses.
"""

import json
import os
import sys
import time
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # before TRL is imported

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer


class Stopwatch(TrainerCallback):
    """Tells how long each update took."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called once an update is done."""
        now = time.perf_counter()
        print(json.dumps({"seconds": now - self._last}), flush=True)
        self._last = now


def main(settings: dict[str, Any]) -> None:
    """Trains for `updates` updates."""
    cpu = settings.get("device", "cpu") == "cpu"
    if cpu:
        torch.set_num_threads(settings["threads"])
    folder, batch = settings["folder"], settings["batch"]
    dtype = {"dtype": getattr(torch, settings.get("weights", "float32"))}
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/policy", trust_remote_code=False)
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(f"{folder}/policy", trust_remote_code=False, **dtype) for _ in range(2)
    )
    reward, value = (
        AutoModelForSequenceClassification.from_pretrained(
            f"{folder}/reward", num_labels=1, trust_remote_code=False, **dtype
        )
        for _ in range(2)
    )
    with open(f"{folder}/prompts.jsonl", encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines]
    config = PPOConfig(
        output_dir=f"{folder}/trl",
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=1,
        num_mini_batches=settings["minibatches"],
        num_ppo_epochs=settings["epochs"],
        total_episodes=batch * settings["updates"],
        local_rollout_forward_batch_size=settings.get("forward", batch),
        response_length=settings["response"],
        stop_token=None if settings["equal"] else "eos",
        temperature=1.0,
        learning_rate=settings["rate"],
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=cpu,
        num_sample_generations=0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = Dataset.from_dict({"input_ids": tokenizer(prompts)["input_ids"]})
    PPOTrainer(
        config,
        tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=value,
        train_dataset=data,
        eval_dataset=data.select(range(batch)),
        callbacks=[Stopwatch()],
    ).train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
