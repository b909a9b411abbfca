"""The commands `quartet train`, `check`, `evaluate` and others: each connects the packages.

May import all but cli, entry and report. api, cli and recipes import it.
"""
