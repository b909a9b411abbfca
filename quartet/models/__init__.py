"""Hugging Face models: loading, scalar heads, padding and packing, offload, and their arithmetic.

May import config, seams and wire. learner, ranks, weight_transfer, services and orchestrator import it.
"""
