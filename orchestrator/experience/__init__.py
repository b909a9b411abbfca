"""From prompts to complete samples (sampled, scored, referenced, valued), and their journal on disk.

May import algorithms, clients, config, data, environments, quartet, services and tracing. cli, commands,
evaluation and loop import it.
"""
