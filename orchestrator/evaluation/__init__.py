"""Held-out evaluation: sampling, judging, results on disk, confidence intervals.

May import algorithms, experience, monitoring and quartet. commands, loop, report and supervised import it.
"""
