"""Text that ranks tokenize while training reads it: files, fragments, blocks of rows, lanes, samples.

In: text files frozen at the submit, and cursors of lanes. Out: samples, and the cursor behind each. docs/streams.md
explains it.
"""
