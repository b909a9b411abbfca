"""Strict, frozen configuration and its error messages; the sections that several services share.

May import wire. Every other package here may import it.
"""
