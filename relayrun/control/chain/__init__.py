"""The chain of a run: the Slurm jobs that continue one run, one behind the other.

In it: the supervisor beside the ranks, the watch, the jobs in the queue, nodes to exclude, evaluation jobs, campaigns.
In: `plan.json`, the records of the run directory, the answers of the scheduler. Out: records, queued jobs, STOP.
Standard library only. `relayrun help chain` explains it, `relayrun help failure-modes` the ways it can end.
"""
