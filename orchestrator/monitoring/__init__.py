"""Metrics of a run: metrics.jsonl, which feeds TensorBoard and W&B, the live progress line, and run.log.

May import config and quartet. api, cli, commands, evaluation, loop, recipes and report import it.
"""
