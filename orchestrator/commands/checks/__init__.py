"""Checks of a file before anything is started: sections against each other, and against the models on this machine.

May import run_folder, clients, algorithms, config, data, deployment, environments, evaluation, experience, policy,
quartet and services. cli, evaluate, init, train and up import it.
"""
