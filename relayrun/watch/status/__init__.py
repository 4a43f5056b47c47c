"""The state of runs.

    queue            the jobs of a run, as the scheduler reports them
    summary          one run as one line of a table: state, progress, checkpoint, end, remaining time
    run_status       one run in full; run_status_text: the same as text and JSON
    runs             many runs, with one question to the scheduler
    tables           tables of runs, and printing of tables

In come run directories and the scheduler's answers; the clock is an argument. docs/monitoring.md explains it.
"""
