"""Hugging Face models: loading, scalar heads, padding and packing, offload, and their arithmetic.

May import config, seams and wire. learner, objectives, ranks, weight_transfer, services and orchestrator import it.
"""
