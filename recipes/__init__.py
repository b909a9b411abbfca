"""Makers of the demos' models and data, which need no downloads.

May import services. Nothing imports it.
"""
