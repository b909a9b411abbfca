"""Held-out evaluation: sampling, judging, results on disk, confidence intervals.

May import data, experience and monitoring. loop, report and commands import it.
"""
