"""Checks of the text of code and pages, which `make lint` runs: no test of what the code does."""
