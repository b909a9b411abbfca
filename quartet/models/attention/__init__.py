"""Attention over padded and packed sequences, and keys and values that are kept for sequences that go on.

May import numerics and wire. compiled, frozen_passes, loading, sequences and orchestrator import it.
"""
