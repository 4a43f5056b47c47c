"""The section `data`: data sets of the mixture, their order, document windows, and text that ranks tokenize.

`data.document_window` cuts documents into windows and packs them into rows. `source` and `stream` of a data set
describe text files; their names are those of fairseq2's parquet pipeline.
"""

import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, model_validator

from relayrun.config.sections import conditions
from relayrun.config.sections.base import NAME_PATTERN, Fraction, ImportPath, Section
from relayrun.config.sections.dataclass_section import NonNegative, OutputPath, Positive

DOCUMENT_WINDOW = "document-window"
"""Name of the order."""

Packing = Literal["none", "pad", "split", "greedy", "first_fit", "best_fit"]


class DocumentWindowSection(Section):
    """The cut of documents into windows by `order: document-window`, and the rows of training.seq_length tokens."""

    window: Positive | None = None
    """Tokens of a window, bos and eos included; default: training.seq_length. A longer document is cut into several."""
    overlap: NonNegative = 0
    """Tokens of a document that a window shares with the window before it. (transformers calls this `stride`.)"""
    bos: NonNegative | None = None
    """Token id before every window; default: none."""
    eos: bool | NonNegative = False
    """Token id after every window; true: the tokenizer's end of document."""
    drop_eod: bool = False
    """Leave out the end of document at the end of every document in the shards, for example because eos puts one after
    every window. A document without it ends the run."""
    mask_special: bool = False
    """Exclude the prediction of a window's eos from the loss. (Nothing predicts its bos.)"""
    packing: Packing = "best_fit"
    """Content of a row. none: one window, and padding; pad: as none, and no token attends to padding; split: windows
    one after the other, cut where a row is full; greedy: windows in their order, as long as they fit; first_fit: each
    in the first row with room; best_fit: the longest first, each in the fullest row with room."""

    @model_validator(mode="after")
    def _overlap(self) -> Self:
        if self.window is not None:
            self.check(self.window)
        return self

    def check(self, window: int) -> None:
        """Raise ValueError if windows of `length` tokens leave no text, or do not advance."""
        text = window - (self.bos is not None) - (self.eos is not False)
        if self.overlap >= text:
            raise ValueError(
                f"document_window.overlap {self.overlap} must be below the {max(text, 0)} tokens of text in a window "
                f"of {window}"
            )

    @property
    def packs(self) -> bool:
        """True if rows have lengths of their windows, which attention separates."""
        return self.packing != "none"


TOKEN_SHARDS = "tokens"
SourceKind = Literal["tokens", "parquet", "jsonl", "arrow"]
"""Token shards, and the formats of text (`relayrun.tokens.readers.inputs`) that a run can tokenize while training."""
OnError = Literal["fail", "skip-file", "skip-line"]

DEFAULT_LANES = 64
"""Default of `data.lanes`."""


def _checked_row_filter(text: str) -> str:
    conditions.parse_row_condition(text)
    return text


RowFilter = Annotated[str, AfterValidator(_checked_row_filter)]
"""A condition on rows, see `relayrun.config.sections.conditions`."""


class StreamSubset(Section):
    """A part of a data set, for a trial."""

    nb_files: Positive | None = None
    """Number of files, the first by name; default: all."""
    fraction_of_files: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the files, the first by name, at least one; default: all."""
    nb_fragments: Positive | None = None
    """Number of fragments (row groups, or files) of the files in the order of their names; default: all."""
    nb_rows: Positive | None = None
    """Number of rows of the files in the order of their names, before any filter; default: all."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name, value in self if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} limit the same data set; give one of them")
        return self


class StreamSection(Section):
    """Reading, filters and shuffle of a data set of text. Every setting except `nb_prefetch` changes the samples."""

    column: str = "text"
    """Column of the text; a name with dots is a nested field."""
    split_to_row_groups: bool = True
    """A fragment is a row group of a parquet file; otherwise, and for other formats always, a file."""
    fragment_shuffle_window: Annotated[int, Field(ge=-1)] = 40
    """0: files and fragments in the order of their names. n: files are shuffled, then their fragments within windows of
    n. -1: all fragments are shuffled, for which all metadata are read first. Anew in every epoch."""
    files_circular_shift: bool = False
    """Deal the files of an epoch to groups of lanes in contiguous runs, so that each group begins elsewhere; otherwise
    one by one in turns."""
    seed: int | None = None
    """Seed of all shuffles of the data set; default: training.seed."""
    nb_epochs: Positive | None = None
    """Number of epochs; a run that needs more ends with an error. Default: unlimited."""
    partition_filters: RowFilter | None = None
    """Condition on the parts `name=value` of the files' paths."""
    filters: RowFilter | None = None
    """Condition on the columns of parquet files, or on the names in lines of JSON (a missing name is null), applied
    before everything else."""
    on_error: OnError = "fail"
    """Handling of unreadable data, as with `--on-error` of tokenization. fail: end the run. skip-file: leave out and
    count the whole file. skip-line: leave out a line or row without UTF-8 text and count it by reason; likewise a file
    that cannot be read at all. Each file is read once more, before its first row."""
    drop_null: bool = True
    """Leave out and count rows without a text; otherwise they end the run."""
    min_len: NonNegative = 0
    """Minimum characters of a text; shorter rows are left out and counted."""
    max_len: Positive | None = None
    """Maximum characters of a text; longer rows are left out and counted. Default: unlimited."""
    extra_columns: list[str] = []
    """Columns of parquet files that `map` gets besides the text."""
    map: ImportPath | None = None
    """A user's function of a row, a dict of the text column and `extra_columns`: it returns the text to train on, or
    None to leave the row out. It runs in the ranks after all filters, and must always return the same for a row."""
    limit: StreamSubset | None = None
    """A part of the files, fragments or rows, for a trial."""
    shuffle_buffer: NonNegative = 10_000
    """Rows of a shuffle, over all lanes; a lane shuffles its share, or 256 rows if that is more, as a block. 0: the
    rows of a fragment stay in order."""
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
        """Return the settings that change the samples, by name, plain JSON."""
        values = self.model_dump(mode="json", exclude={"nb_prefetch"})
        return {f"stream.{name}": value for name, value in values.items()}


MOCK_ORDER = "mock"
"""Order of the data set for `mock_data`."""


class DataSource(Section):
    """A data set of a mixture."""

    path: str | list[str] | None = None
    """Folders of .bin/.idx shards, shards (without suffix), or patterns of either, read in the order of the list; only
    a user's own order may omit it. With another `source`: folders, files or patterns of files, or URLs."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """Share of the samples, in any unit: the weights of a mixture are divided by their sum."""
    order: str | None = None
    """`window`, `document-window` or `module:callable`; default: data.order."""
    document_window: DocumentWindowSection | None = None
    """Cut and packing of this data set's documents; default: data.document_window."""
    source: SourceKind = "tokens"
    """Content of the files: `tokens`, or text that ranks tokenize while training: `parquet`, `jsonl` (also compressed)
    or `arrow`."""
    stream: StreamSection | None = None
    """Reading, filters and shuffle of text (a `source` other than `tokens`)."""
    options: dict[str, Any] = {}
    """Options for a user's own order, which alone reads them."""
    loss_mask: bool = False
    """A user's own order returns a loss mask with its tokens: `read` returns both, or `row` a
    `relayrun.tokens.order.sample_rows.SampleRow`. Without this setting a mask ends the run."""
    edition: Positive = 1
    """Number of the edition, which rises when other files replace the present ones. Set by submit."""

    def identity(self, name: str) -> str:
        """Return the name under which samples are counted: `name`, or `name@2` from edition 2 on."""
        return name if self.edition == 1 else f"{name}@{self.edition}"

    @property
    def is_stream(self) -> bool:
        """True for text that ranks tokenize while training."""
        return self.source != TOKEN_SHARDS

    @property
    def paths(self) -> list[str]:
        return [] if self.path is None else [self.path] if isinstance(self.path, str) else self.path


_WITHOUT_EFFECT_ON_MOCK_DATA = ("datasets", "validation", "split", "document_window", "mask_tokens_except")
"""Settings that `mock_data` replaces."""
_ORDER = re.compile(r"window|document-window|mock|[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class DataSection(Section):
    """The tokens to read, and their order. Relative paths start at the folder that holds `launchers/`."""

    tokenizer: str
    """Folder or file of the tokenizer of the shards (for its size and its end of document)."""
    allow_other_tokenizer: bool = False
    """Accept shards of another tokenizer than `tokenizer`; ids beyond its vocabulary still end the run."""
    datasets: list[str] = []
    """Folders of .bin/.idx shards; links are followed. Short for a mixture of one data set, `train`."""
    mixture: dict[Annotated[str, Field(pattern=NAME_PATTERN)], DataSource] = {}
    """Data sets by name. May be the name of a YAML or JSON file with this content, or `path*,0.3;path*,0.7`. After a
    change on a resume, every data set continues at its position."""
    validation: dict[Annotated[str, Field(pattern=NAME_PATTERN)], list[str]] = {}
    """Held-out sets by name, each a list of folders; never part of training. With `order: document-window` their
    documents are cut and packed by `document_window`, with every other order they are read as with `window`."""
    split: Fraction = 0.0
    """Held-out share of each data set, the documents at its end: a validation set of the data set's name."""
    order: str = "window"
    """Cut and shuffle of a data set's windows: `window`, without an index; `document-window`, windows that never cross
    a document; `module:callable`, a user's own."""
    document_window: DocumentWindowSection | None = None
    """Default cut and packing for data sets of `order: document-window`."""
    data_cache_dir: OutputPath | None = None
    """Folder for the row counts of `order: document-window`, which are otherwise kept in the run directory, and for
    Megatron-LM's indices."""
    shard_cache_dir: OutputPath | None = None
    """Folder on each node's own disk that caches blocks of token shards below URLs; required for such shards."""
    shard_cache_gb: Annotated[float, Field(ge=0.01)] = 20.0
    """Maximum size of that folder in 10^9 bytes, for all ranks of a node together; the least recently used blocks are
    removed."""
    lanes: Positive = DEFAULT_LANES
    """Lanes of the data sets that are streams: the number of data-parallel replicas must divide it at every resume. Set
    a number with many divisors: 48 replicas take 192, 512 take 512."""
    num_workers: Annotated[int, Field(ge=0, le=1)] = 1
    """Processes beside each rank that read and tokenize its streams; 0: a thread of the rank. Changes speed and memory
    alone."""
    max_epochs: Annotated[float, Field(gt=0)] = 100.0
    """Maximum epochs of a data set until the last step; above 4 a submit warns (`relayrun help check`)."""
    reset_position_ids: bool = False
    """Positions restart at 0 after each end of document. Rotary positions are relative: with reset_attention_mask this
    changes rounding alone."""
    reset_attention_mask: bool = False
    """A token attends to its own document alone. No mask is built: time and memory fall with the documents' lengths."""
    eod_mask_loss: bool = False
    """Exclude the prediction after an end of document from the loss."""
    mask_tokens_except: Annotated[str, Field(min_length=1)] | None = None
    """Characters, such as `ACGTacgt`: predictions of other tokens are excluded from the loss. Each must be a single
    token of the tokenizer. Default: all tokens count."""
    mock_data: bool = False
    """Made-up tokens replace tokenizer, data sets and validation sets; nothing is read."""
    mock_vocabulary_size: Positive = 128_256
    """Size of the vocabulary of the made-up tokens; the default is Llama 3's."""

    @model_validator(mode="before")
    @classmethod
    def _mock(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("mock_data") is not True:
            return values
        size = values.get("mock_vocabulary_size", cls.model_fields["mock_vocabulary_size"].default)
        source = {"weight": 1.0, "order": MOCK_ORDER, "options": {"vocabulary_size": size}}
        rest = {name: value for name, value in values.items() if name not in _WITHOUT_EFFECT_ON_MOCK_DATA}
        return rest | {"mixture": {"mock": source}}

    @property
    def depends_on_ends(self) -> bool:
        """True if a setting depends on the token that ends a document."""
        dropped = any(cut.drop_eod for cut in self._cuts)
        return self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss or dropped

    @property
    def cut_by_document(self) -> dict[str, DocumentWindowSection]:
        """Cut and packing of the data sets with `order: document-window`, by name."""
        return {
            name: source.document_window or self.document_window or DocumentWindowSection()
            for name, source in self.sources.items()
            if (source.order or self.order) == DOCUMENT_WINDOW
        }

    def order_of(self, name: str) -> tuple[str, dict[str, Any]]:
        """Return order and options of a data set, which determine its samples together with its files."""
        source, cut = self.sources[name], self.cut_by_document.get(name)
        return source.order or self.order, source.options if cut is None else cut.model_dump(mode="json")

    def stream_of(self, name: str) -> dict[str, Any]:
        """Return the stream settings that determine the samples of a data set; empty for token shards."""
        source = self.sources[name]
        if not source.is_stream:
            return {}
        return {"source": source.source, "data.lanes": self.lanes, **(source.stream or StreamSection()).record()}

    @property
    def streams(self) -> dict[str, StreamSection]:
        """Stream settings of the text data sets, by name."""
        return {name: source.stream or StreamSection() for name, source in self.sources.items() if source.is_stream}

    @property
    def attends_documents(self) -> bool:
        """True if rows exist in which a token attends to less than all tokens before it."""
        return self.reset_attention_mask or self._packs

    @property
    def restarts_positions(self) -> bool:
        """True if rows exist in which positions restart at 0."""
        return self.reset_position_ids or self._packs

    @property
    def masks_loss(self) -> bool:
        """True if tokens exist whose loss does not count."""
        masked = any(source.is_stream or source.loss_mask for source in self.sources.values())
        return self.eod_mask_loss or self.mask_tokens_except is not None or masked or bool(self._cuts)

    @property
    def validation_cut(self) -> DocumentWindowSection | None:
        """Cut and packing of the sets in `validation`; None: as with `order: window`."""
        return (self.document_window or DocumentWindowSection()) if self.order == DOCUMENT_WINDOW else None

    @property
    def _cuts(self) -> list[DocumentWindowSection]:
        held_out = [self.validation_cut] if self.validation and self.validation_cut is not None else []
        return [*self.cut_by_document.values(), *held_out]

    @property
    def _packs(self) -> bool:
        return any(cut.packs for cut in self._cuts)

    @property
    def sources(self) -> dict[str, DataSource]:
        """The data sets of the mixture by name, also if `datasets` is given."""
        return self.mixture or {"train": DataSource(path=self.datasets, weight=1.0)}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if bool(self.datasets) == bool(self.mixture):
            raise ValueError("give either datasets or mixture")
        for name, source in self.sources.items():
            order = source.order or self.order
            if not _ORDER.fullmatch(order):
                raise ValueError(f"order {order!r} is none of window, document-window, module:callable")
            own = ":" in order or order == MOCK_ORDER
            self._check_stream(name, order)
            if source.loss_mask and ":" not in order:
                raise ValueError(
                    f"mixture.{name}: loss_mask belongs to a user's own order, module:callable, not {order}"
                )
            self._check_urls(name, order)
            if not source.paths and not own:
                raise ValueError(f"mixture.{name}: this data set has no path")
            if order == DOCUMENT_WINDOW and self.split:
                raise ValueError(
                    f"mixture.{name}: data.split would hold out windows that overlap those of training, or rows with "
                    "parts of the same documents; hold data out by path"
                )
            if order == DOCUMENT_WINDOW and source.options:
                raise ValueError(f"mixture.{name}: order {order!r} takes document_window, and no options")
            if source.document_window is not None and order != DOCUMENT_WINDOW:
                raise ValueError(f"mixture.{name}: document_window belongs to order: {DOCUMENT_WINDOW}, not {order!r}")
            if own and self.split:
                raise ValueError(
                    f"mixture.{name}: data.split cannot hold out a part of a user's own order {order!r}; "
                    "hold data out by path"
                )
            if self.split and name in self.validation:
                raise ValueError(f"data.split makes a validation set {name!r}, and data.validation has one too")
        held_out = [path for paths in self.validation.values() for path in paths if "://" in path]
        if held_out:
            raise ValueError(
                f"data.validation: {held_out[0]} is a URL, and validation sets are read from local folders"
            )
        if self.document_window is not None and not self._cuts:
            raise ValueError(f"data.document_window: no data set has order: {DOCUMENT_WINDOW}, which alone reads it")
        return self

    def _check_urls(self, name: str, order: str) -> None:
        """Raise ValueError for token shards below URLs with settings that do not support URLs."""
        source = self.sources[name]
        urls = [path for path in source.paths if "://" in path]
        if urls and not source.is_stream:
            if order not in ("window", DOCUMENT_WINDOW):
                raise ValueError(f"mixture.{name}: order {order} reads local shards, and {urls[0]} is a URL")
            if self.shard_cache_dir is None:
                raise ValueError(
                    f"mixture.{name}: {urls[0]} is a URL; set data.shard_cache_dir, a folder of each node's own disk"
                )

    def _check_stream(self, name: str, order: str) -> None:
        """Raise ValueError if source, stream, order and split contradict each other."""
        source = self.sources[name]
        if not source.is_stream:
            if source.stream is not None:
                _, *kinds, last = get_args(SourceKind)
                raise ValueError(
                    f"mixture.{name}: stream belongs to source: {', '.join(kinds)} or {last}, not {TOKEN_SHARDS}"
                )
            return
        if order not in ("window", DOCUMENT_WINDOW):
            raise ValueError(
                f"mixture.{name}: source: {source.source} is read with order: window or {DOCUMENT_WINDOW}, not {order}"
            )
        if source.options:
            raise ValueError(f"mixture.{name}: source: {source.source} takes stream, and no options")
        if self.split:
            raise ValueError(
                f"mixture.{name}: data.split needs numbered windows, and a stream has none; hold out by path"
            )
        if source.source != "parquet" and source.stream is not None:
            if source.stream.filters and source.source != "jsonl":
                raise ValueError(f"mixture.{name}: stream.filters needs source: parquet or jsonl")
            if source.stream.extra_columns:
                raise ValueError(f"mixture.{name}: stream.extra_columns needs source: parquet")
