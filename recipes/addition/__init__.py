"""Sums of two-digit numbers: a policy that is often wrong, and a rule that tells when.

May import common and quartet. Nothing imports it.
"""
