"""Attention over padded and packed sequences.

May import numerics. compiled, loading, sequences and orchestrator import it.
"""
