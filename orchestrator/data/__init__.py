"""Prompts and examples: the files that hold them, their rows, and the order in which a run takes prompts.

May import config and quartet. commands, experience and supervised import it.
"""
