"""The PPO loop, the estimates of a batch, and the state and checkpoints that a run resumes from.

May import all but cli, commands, data and report. cli and commands import it.
"""
