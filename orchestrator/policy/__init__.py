"""The policy's learner: its loss and the ranks that it runs on.

May import algorithms, config and quartet. cli, commands, learners, loop and push import it.
"""
