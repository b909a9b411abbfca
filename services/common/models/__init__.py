"""Hugging Face models: loading, scalar heads, padding and packing, offload, and their arithmetic.

May import config and wire. ranks, learner, services and the orchestrator import it.
"""
