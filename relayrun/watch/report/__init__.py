"""The report of a run, on a terminal, as HTML and as PNG.

    terminal_report  attempts, loss curve and PNG from the records of a run
    report_data      the data of an HTML report, read once
    page             the HTML report of one run, or of several side by side
    chart            lines, bands and bars as inline SVG, and reduction of many points to the width of a chart
    html             HTML elements, tables, the style sheet and the frame of a page
    live_server      the reports of all runs of a folder, served on loopback

A page has no script and loads nothing; it is readable on a phone, in the dark and on paper. docs/report.md explains
it.
"""
