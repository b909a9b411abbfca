"""Metrics of a run: metrics.jsonl, which feeds TensorBoard and W&B, and the live progress line.

May import config. evaluation, loop, report and commands import it.
"""
