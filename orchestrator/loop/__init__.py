"""The PPO loop, the estimates of a batch, and the state and checkpoints that a run resumes from.

May import every package here but commands and report. commands imports it.
"""
