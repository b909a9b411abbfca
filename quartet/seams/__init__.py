"""Private names of other libraries, a file for each library with the versions it is for. All other code imports
public names only. A test of each fails when the library changes under it; docs/development.md says what an upgrade
takes.

May import config. learner, models, ranks, serving, weight_transfer and services import it.
"""
