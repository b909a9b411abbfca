"""PPO by Quartet against PPO by TRL, in turns."""
