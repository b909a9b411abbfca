"""From prompts to complete samples (sampled, scored, referenced, valued), and their journal on disk.

May import clients, config, data, services and tracing. commands, evaluation and loop import it.
"""
