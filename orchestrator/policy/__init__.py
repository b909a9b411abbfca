"""The policy's learner: its objective and the ranks that it runs on.

May import algorithms, config and quartet. cli, commands, learners and push import it.
"""
