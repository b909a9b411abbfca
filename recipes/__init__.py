"""Makers of the demos' models and data, which need no downloads.

May import quartet. Nothing imports it.
"""
