"""From prompts to complete samples (sampled, scored, referenced, valued), and their journal on disk.

May import algorithms, clients, config, data, environments, quartet, services and tracing. commands, evaluation and
loop import it.
"""
