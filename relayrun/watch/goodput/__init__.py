"""What the nodes of a run did, to the second: every node-second is booked into one named part.

    facts        what the run directory and the scheduler know of a run's jobs and attempts
    metrics      the lines of an attempt's metrics.jsonl, read fast
    book         one allocation's time, divided into parts; pure
    account      the parts of a run: by attempt, in all, by cause of loss
    view         an account as tables and as JSON
    parts        the names of the parts

All times inside are whole microseconds, so that the parts sum exactly to what was allocated.
"""
