"""What happened in a run, for people.

    status/          the state of one run and of many: on a terminal and as JSON
    report/          the report of a run: on a terminal, as HTML, as PNG
    goodput/         where the node time of a run went
    follow           the progress and the logs of a running job
    cron_check       one pass over the runs of a folder, started by cron; symptoms: the problems that it knows
    send_notices     sends notices by the channels of notice_channels; unsent_notices: what is still to be sent

In come run directories and the scheduler's answers; out go text, pages and messages. No job is started or stopped.
docs/monitoring.md, docs/goodput.md and docs/notify.md explain it.
"""
