"""Processes that begin with torch and DeepSpeed imported: forks of one process, which is started with the first."""

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
# One list, as each process of pytest has one such process, by the first test that asks for it.
FORKED.set_forkserver_preload(["tests.members", "tests.unit.layouts", "tests.frozen"])
