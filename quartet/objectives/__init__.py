"""Objectives that learners minimise, each a class in a file: value functions, likelihood, preferences.

May import columns, learner and models. orchestrator and services import it.
"""
