"""Evaluation, held-out of a run and of rows alone: sampling, scoring, judging, results on disk, statistics.

May import algorithms, experience, monitoring, quartet and services.
cli, commands, loop, report and supervised import it.
"""
