"""One trainable model under DeepSpeed: layouts, minibatches, LoRA, running means, snapshots.

May import config, folders, models, ranks, seams and wire. orchestrator and services import it.
"""
