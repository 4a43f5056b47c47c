"""The report of a run, read from the records of its run directory.

    report_data      the data of a report
    page, chart, html  one HTML file, without scripts and network access
    terminal_report  tables and a loss curve on a terminal, a PNG

`relayrun help report` explains it.
"""
