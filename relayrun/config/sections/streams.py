"""Text that is tokenized while training reads it: `source` and `stream` of a data set of the mixture.

Names are those of fairseq2's parquet pipeline, where it has one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from relayrun.config.sections import row_filter
from relayrun.config.sections.base import ImportPath, NonNegative, Positive, Section

TOKEN_SHARDS = "tokens"
SourceKind = Literal["tokens", "parquet", "jsonl", "arrow"]
OnError = Literal["fail", "skip-file", "skip-line"]

DEFAULT_LANES = 64
"""Lanes of a run, where nothing else is said."""


def _checked_row_filter(text: str) -> str:
    row_filter.parse_row_condition(text)
    return text


RowFilter = Annotated[str, AfterValidator(_checked_row_filter)]
"""A condition on rows, see `row_filter`."""


class StreamLimit(Section):
    """A part of a data set, for a trial."""

    nb_files: Positive | None = None
    """So many files, the first by name; default: all."""
    fraction_of_files: Annotated[float, Field(gt=0, le=1)] | None = None
    """This share of the files, the first by name, at least one; default: all."""
    nb_fragments: Positive | None = None
    """So many fragments (row groups, or files) of the files in the order of their names; default: all."""
    nb_rows: Positive | None = None
    """So many rows of the files in the order of their names, before any filter; default: all."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name, value in self if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} limit the same data set; give one of them")
        return self


class StreamSection(Section):
    """How a data set of text is read, filtered and shuffled. All but `nb_prefetch` decides the samples."""

    column: str = "text"
    """The column of the text; a name with dots is a nested field."""
    split_to_row_groups: bool = True
    """A fragment is a row group of a parquet file; else, and of other files always, it is a file."""
    fragment_shuffle_window: Annotated[int, Field(ge=-1)] = 40
    """0: files and fragments come in the order of their names. n: the files are shuffled, then their fragments within
    windows of n. -1: all fragments are shuffled, for which all metadata are read first. Anew in every epoch."""
    files_circular_shift: bool = False
    """The files of an epoch are given out to groups of lanes in runs, so that each group begins elsewhere; else one by
    one in turns."""
    seed: int | None = None
    """Seed of all shuffles of the data set; default: training.seed."""
    nb_epochs: Positive | None = None
    """How often the data set is read; a run that asks for more ends with an error. Default: for ever."""
    partition_filters: RowFilter | None = None
    """Files that are read: a condition on the parts `name=value` of their paths."""
    filters: RowFilter | None = None
    """Rows that are read: a condition on the columns of parquet files, or on the names of lines of JSON (one that a
    line lacks is null), before everything else."""
    on_error: OnError = "fail"
    """What becomes of what cannot be read, as with `--on-error` of tokenization. fail: it ends the run. skip-file: the
    whole file is left out, and counted. skip-line: a line or row without a text in UTF-8 is left out, and counted by
    reason, and so is a file that cannot be read at all. Each file is read once more, before its first row."""
    drop_null: bool = True
    """Rows without a text are left out, and counted; else they end the run."""
    min_len: NonNegative = 0
    """Characters of a text; rows with fewer are left out, and counted."""
    max_len: Positive | None = None
    """Characters of a text; rows with more are left out, and counted. Default: none is."""
    extra_columns: list[str] = []
    """Columns of parquet files that `map` gets beside the text."""
    map: ImportPath | None = None
    """A user's own function of a row, a dict of the column of the text and `extra_columns`: it returns the text to
    train on, or None to leave the row out. It comes behind all filters, runs in the ranks, and must always give the
    same for a row."""
    limit: StreamLimit | None = None
    """A part of the files, fragments or rows, for a trial."""
    shuffle_buffer: NonNegative = 10_000
    """Rows among which rows are shuffled, over all lanes; a lane shuffles its share, or 256 rows where that is more, as
    a block. 0: the rows of a fragment come in their order."""
    nb_prefetch: NonNegative = 1
    """Blocks that each group of lanes reads ahead. Changes speed and memory alone."""

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.extra_columns and self.map is None:
            raise ValueError("stream.extra_columns are for stream.map, and there is none")
        if self.max_len is not None and self.max_len < self.min_len:
            raise ValueError(f"stream.max_len {self.max_len} is below stream.min_len {self.min_len}: no row fits")
        return self

    def record(self) -> dict[str, Any]:
        """What decides the samples, plain JSON, by the names of the settings."""
        values = self.model_dump(mode="json", exclude={"nb_prefetch"})
        if self.on_error == "fail":
            del values["on_error"]  # as checkpoints of earlier versions have it
        return {f"stream.{name}": value for name, value in values.items()}
