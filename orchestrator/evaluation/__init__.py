"""Held-out evaluation: sampling, judging, results on disk, confidence intervals.

May import experience, monitoring and services. commands, loop and report import it.
"""
