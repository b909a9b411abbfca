"""TRL's side of a race. Runs in the virtual environment that holds TRL, and imports nothing of Quartet.

    python peer.py SETTINGS

SETTINGS is JSON: a case, and on a GPU also `device`, the dtype of the `weights`, and `tries`: batches, each with how
many of its responses go through a training pass at a time, `micro`. The first that the GPU's memory takes counts; a
process that is short of memory keeps none of it. Prints a line of JSON for each update by a batch of responses: its
batch and seconds, and when it ended.
"""

import gc
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


class Stopwatch(TrainerCallback):
    """Tells how long each update took, of so many steps as its trainer counts them."""

    def __init__(self, batch: int, steps: int = 1) -> None:
        self._batch, self._steps, self._done, self._last = batch, steps, 0, time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called once a step is done."""
        self._done += 1
        if self._done % self._steps:
            return
        now = time.perf_counter()
        print(json.dumps({"seconds": now - self._last, "ended": time.time(), "batch": self._batch}), flush=True)
        self._last = now


def main(settings: dict[str, Any]) -> None:
    """Trains for `updates` updates. RuntimeError if no batch fits."""
    if settings.get("device", "cpu") == "cpu":
        torch.set_num_threads(settings["threads"])
    with open(f"{settings['folder']}/prompts.jsonl", encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines]
    for tried in settings.get("tries", [{}]):
        if fits(settings | tried, prompts):
            return
        gc.collect()
        torch.cuda.empty_cache()
    raise RuntimeError(f"out of memory with each of {settings['tries']}")


def fits(settings: dict[str, Any], prompts: list[str]) -> bool:
    """Trains; False if the GPU has too little memory for it."""
    try:
        {"ppo": ppo, "grpo": grpo}[settings["algorithm"]](settings, prompts).train()
    except torch.OutOfMemoryError as error:
        print(f"batch {settings['batch']}: {error}", file=sys.stderr, flush=True)
        return False
    return True


def ppo(settings: dict[str, Any], prompts: list[str]) -> Any:
    """The trainer that was left out after TRL 1.12."""
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    batch, policy = settings["batch"], f"{settings['folder']}/policy"
    minibatch = batch // settings["minibatches"]
    micro = settings.get("micro", minibatch)
    tokenizer = AutoTokenizer.from_pretrained(policy, trust_remote_code=False)
    reward, value = (scorer(settings) for _ in range(2))
    config = PPOConfig(
        **common(settings) | {"gradient_accumulation_steps": batch // micro},
        per_device_train_batch_size=micro,
        num_mini_batches=settings["minibatches"],
        num_ppo_epochs=settings["epochs"],
        total_episodes=batch * settings["updates"],
        local_rollout_forward_batch_size=batch,
        response_length=settings["response"],
        stop_token=None if settings["equal"] else "eos",
        num_sample_generations=0,
    )
    data = Dataset.from_dict({"input_ids": tokenizer(prompts)["input_ids"]})
    trainer = PPOTrainer(
        config,
        tokenizer,
        model=language_model(settings),
        ref_model=language_model(settings),
        reward_model=reward,
        value_model=value,
        train_dataset=data,
        eval_dataset=data.select(range(batch)),
        callbacks=[Stopwatch(batch)],
    )
    # An optimizer step for each minibatch: as it is, the trainer would make one for the whole batch.
    trainer.accelerator.gradient_accumulation_steps = minibatch // micro
    return trainer


def grpo(settings: dict[str, Any], prompts: list[str]) -> Any:
    """The trainer of groups, whose loss is that of the paper: the mean over responses of the mean over tokens."""
    from trl import GRPOConfig, GRPOTrainer

    steps = settings["epochs"] * settings["minibatches"]
    config = GRPOConfig(
        **common(settings),
        per_device_train_batch_size=settings["batch"] // settings["minibatches"],
        steps_per_generation=settings["minibatches"],
        num_iterations=settings["epochs"],
        num_generations=settings["each"],
        max_completion_length=settings["response"],
        max_steps=steps * settings["updates"],
        loss_type="grpo",
        beta=0.0,
        logging_steps=10**9,
    )
    tokenizer = AutoTokenizer.from_pretrained(f"{settings['folder']}/policy", trust_remote_code=False)
    return GRPOTrainer(
        language_model(settings),
        reward_funcs=scorer(settings),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        reward_processing_classes=tokenizer,
        callbacks=[Stopwatch(settings["batch"], steps)],
    )


def common(settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of either trainer."""
    return {
        "output_dir": f"{settings['folder']}/trl",
        "gradient_accumulation_steps": 1,
        "temperature": 1.0,
        "learning_rate": settings["rate"],
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": settings.get("device", "cpu") == "cpu",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def language_model(settings: dict[str, Any]) -> Any:
    """The policy as it begins."""
    return AutoModelForCausalLM.from_pretrained(
        f"{settings['folder']}/policy", trust_remote_code=False, dtype=dtype(settings)
    )


def scorer(settings: dict[str, Any]) -> Any:
    """The reward model."""
    return AutoModelForSequenceClassification.from_pretrained(
        f"{settings['folder']}/reward", num_labels=1, trust_remote_code=False, dtype=dtype(settings)
    )


def dtype(settings: dict[str, Any]) -> torch.dtype:
    """The dtype of all weights."""
    made: torch.dtype = getattr(torch, settings.get("weights", "float32"))
    return made


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
