"""The policy's learner: its objective and the ranks that it runs on.

May import algorithms, config and quartet. commands and learners import it.
"""
