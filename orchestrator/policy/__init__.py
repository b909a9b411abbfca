"""The policy's learner: its objective and the ranks that it runs on.

May import algorithms, config, learners and quartet. commands imports it.
"""
