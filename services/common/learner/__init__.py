"""One trainable model under DeepSpeed: layouts, minibatches, LoRA, running means, snapshots.

May import ranks, models, config, wire and folders. The critic and the policy import it.
"""
