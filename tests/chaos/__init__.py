"""Random faults under a run of `quartet train`: `python -m tests.chaos --faults 200 --seed 0`.

Processes of every kind are killed or frozen at random moments, also during starts, resumes, pushes and checkpoints.
The run must go on, train every step and every sample once, and lose little time by a frozen replica. Ray's own
processes, such as its GCS and raylet, are left alone: with them the cluster ends, as Ray is built.
"""
