"""Control of a run: the chain, the agents, notices, trainers, the scheduler, the run directory.

In: `plan.json` and the facts of the scheduler and the run directory. Out: queued jobs, running ranks, records, notices.
Order of imports: chain, agent, notify, decisions, trainers, chain_state, job_log, scheduler, rundir. Standard library
only, Python 3.10 and newer. `relayrun help chain` and `relayrun help run-directory` explain it.
"""
