"""Hugging Face models: loading, scalar heads, padding and packing, offload, and their arithmetic.

May import columns, config, seams and wire. learner, objectives, orchestrator, ranks, recipes, services and
weight_transfer import it.
"""
