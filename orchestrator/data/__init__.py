"""Prompts: the files that hold them, their rows, and the order in which a run takes them.

May import config. experience, evaluation, loop and commands import it.
"""
