"""Files of a data set to texts and rows of a bounded size.

    inputs     names of data files, paths files, and lines that cannot be read
    columns    the text column of a file, or all columns, as Arrow data
    json_csv   lines of JSON and rows of CSV to texts
    texts      texts in memory: Arrow arrays, and buffers without a Python object per text

In: paths below a folder or URL. Out: Arrow arrays and tables, all texts UTF-8; a bad line is named or counted.
"""
