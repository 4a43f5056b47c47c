"""Files of data sets and checkpoints, in a local folder or below a URL that fsspec knows.

    urls        paths that may be URLs; listing, opening, and reads that are retried
    direct_io   large local files written past the page cache, and checksums

In: paths and URLs. Out: open files, sizes, times and checksums. Credentials come from the environment.
"""
