"""The report of a run, read from the records of its run directory.

    report_data      the data of a report, and the table of attempts
    page, chart      one HTML file, without scripts and network access

`relayrun help report` explains it.
"""
