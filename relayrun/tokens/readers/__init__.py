"""Read the files of a data set as texts and rows of bounded size.

    inputs        formats and names of data files, paths files
    contents      what the first bytes of a file are
    inventory     splits, numbered sets and twins among the files of a data set
    columns       the text column of a file, or all columns, as Arrow data
    arrow_files   Parquet and Arrow files
    text_files    files of one text, and tar archives
    json_csv      lines of JSON and rows of CSV
    texts         texts in memory: Arrow arrays, and buffers without a Python object per text
    faults        lines and rows that cannot be read

In: paths below a folder or URL. Out: Arrow arrays and tables, all texts UTF-8; a bad line is named or counted.
"""
