"""The state of runs.

    queue            the jobs of a run, as the scheduler reports them
    summary          one run as one line of a table: state, progress, checkpoint, end, remaining time
    run_status       one run in full; run_status_text: the same as text and JSON
    runs             many runs, with one query of the scheduler
    tables           tables of runs, and printing of tables
    cron_check_record  the record of the last cron check

Input: run directories and the scheduler's answers; the clock is an argument. `relayrun help monitoring` explains it.
"""
