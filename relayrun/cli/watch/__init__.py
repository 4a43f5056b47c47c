"""Commands that show the progress and results of runs, and send notices.

status, logs, runs    the state of runs, the output of their jobs and why they ended, the runs in folders
report                report, goodput, metrics
notify, cron_check    notify test and send; sentinel, the check that cron starts
"""
