"""From prompts to complete samples (sampled, scored, referenced, valued), and their journal on disk.

May import clients, config and data. evaluation, loop and commands import it.
"""
