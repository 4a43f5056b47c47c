"""Verbs that show what runs did, and tell people.

status, logs, runs    the state of runs, the output of their jobs, the runs in folders
report                report, goodput
notify, cron_check    notify test and send; sentinel, the check that cron starts
"""
