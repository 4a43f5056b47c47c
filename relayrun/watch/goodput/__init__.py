"""Goodput: the node time of a run, every node-second booked into one named part.

    facts        the jobs and attempts of a run: its records, completed with the scheduler's times
    ledger       the names of the parts, and the cursor that books time into them
    attribution  the metrics as columns of numbers; divides the time of one allocation into parts
    account      the parts of a run: by attempt, in total, by cause of loss
    tables       an account as tables and as JSON

All times are integer microseconds of all nodes, so sums are exact. `relayrun help goodput` explains the parts.
"""
