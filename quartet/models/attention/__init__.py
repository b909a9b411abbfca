"""Attention over padded and packed sequences.

May import numerics and seams. compiled, loading, sequences and orchestrator import it.
"""
