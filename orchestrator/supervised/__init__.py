"""Trainings on examples that lie on disk, which come before PPO: supervised fine-tuning and reward models.

May import config, data, evaluation and quartet. cli, commands and recipes import it.
"""
