"""PPO and GRPO by Quartet against the same by TRL, in turns."""
