"""The chain of a run: the Slurm jobs that continue one run, one behind the other.

In it: the supervisor beside the ranks, the watch, the jobs in the queue, nodes to exclude, evaluation jobs, campaigns.
In: `plan.json`, the records of the run directory, the answers of the scheduler. Out: records, queued jobs, STOP.
Standard library only. docs/chain.md explains it, docs/failure-modes.md the ways it can end.
"""
