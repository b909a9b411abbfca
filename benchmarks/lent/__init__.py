"""One command for a rented or lent GPU machine that has no package registry and little time.

    python -m benchmarks.lent pack FOLDER      here: the project and the wheels that the machine lacks, in parts
    sh PART/run.sh --seconds 500               there, for each part: installs it, and goes on with the stages
    python -m benchmarks.lent report FILE      the figures beside those expected

README.md says how to use them. `run` and `report` import nothing that has to be installed.
"""
