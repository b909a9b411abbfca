"""Strict, frozen configuration and its error messages; the sections that several services share.

May import wire. All but columns, folders, objectives, tasks, threads, trajectory, weight_transfer and wire import it.
"""
