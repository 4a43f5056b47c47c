"""Read the files of a data set as texts and rows of bounded size.

    inputs     names of data files, paths files, and lines that cannot be read
    columns    the text column of a file, or all columns, as Arrow data
    json_csv   lines of JSON and rows of CSV to texts
    texts      texts in memory: Arrow arrays, and buffers without a Python object per text

In: paths below a folder or URL. Out: Arrow arrays and tables, all texts UTF-8; a bad line is named or counted.
"""
