"""Text that is tokenized while training reads it: files to fragments, blocks of rows, lanes, samples."""
