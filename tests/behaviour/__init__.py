"""A record of behaviour: what users, jobs and kills notice of the package, as text files.

Two trees are compared by their records:

    python -m tests.behaviour record --out FOLDER         write the record of this tree
    python -m tests.behaviour compare --against FOLDER    record this tree, print what differs; exit status 1 or 0
    python -m tests.behaviour faults                      plant the faults of `faults`, one by one, and run their tests

The record holds no time, no temporary path, no process id, and no module path of the package but the names in `names`.
Each part is one module with a function `record(folder)`.
"""
