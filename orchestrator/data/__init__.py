"""Prompts: the files that hold them, their rows, and the order in which a run takes them.

May import config and quartet. commands and experience import it.
"""
