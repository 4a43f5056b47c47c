"""Views of a run for people.

    status/          the state of one run and of many: on a terminal and as JSON
    report/          the report of a run: on a terminal, as HTML, as PNG
    goodput/         a run's node time, divided into named parts
    prometheus       metrics of runs for Prometheus
    follow           the progress and the logs of a running job
    cron_check       one check of the runs below a folder, started by cron; symptoms: the problems that it finds
    send_notices     sends notices by apprise or a command; unsent_notices: notices not sent yet

Input: run directories and the scheduler's answers. Output: text, pages and messages. No job is started or stopped.
`relayrun help monitoring`, `relayrun help goodput` and `relayrun help notify` explain it.
"""
