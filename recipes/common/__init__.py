"""Code that the recipes share: a tiny Llama, its tokenizer, training, sampling, and making things once.

May import orchestrator and quartet. addition and reviews import it.
"""
