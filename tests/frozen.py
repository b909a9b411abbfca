"""Imported last by a process whose forks share what it imported: none of that is garbage, and where a fork searches
for some, it would copy all of it."""

import gc

gc.freeze()
