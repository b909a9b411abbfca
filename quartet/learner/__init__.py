"""One trainable model under DeepSpeed, and the loop that trains it by an objective.

Beside them layouts, minibatches, LoRA, running means and snapshots.

May import columns, config, folders, models, ranks, seams and wire. objectives, orchestrator and services import it.
"""
