"""Processes that begin with torch and DeepSpeed imported: forks of one process, which is started with the first."""

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
# One list, as there is one such process for each process of pytest, whoever asks for it first.
FORKED.set_forkserver_preload(["tests.members", "tests.unit.layouts", "tests.frozen"])
