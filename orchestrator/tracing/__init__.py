"""Spans of who worked when, the trace file that Perfetto shows, and the shares of time in which each part waited.

May import nothing. commands, experience, loop, push and report import it.
"""
