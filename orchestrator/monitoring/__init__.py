"""Metrics of a run: metrics.jsonl, which feeds TensorBoard and W&B, and the live progress line.

May import config and quartet. api, cli, commands, evaluation, loop, recipes and report import it.
"""
