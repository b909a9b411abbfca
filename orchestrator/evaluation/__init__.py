"""Held-out evaluation: sampling, judging, results on disk, confidence intervals.

May import experience, monitoring and quartet. commands, loop and report import it.
"""
