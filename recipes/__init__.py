"""Makers of the demos' models and data, which need no downloads.

May import orchestrator and quartet. Nothing imports it.
"""
