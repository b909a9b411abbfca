"""The policy's learner: its loss and the ranks that it runs on.

May import algorithm, config and services.common. push, loop and commands import it.
"""
