"""Windows that never cross a document, and how rows are filled with them: `data.document_window`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from relayrun.config.sections.base import NonNegative, Positive, Section

DOCUMENT_WINDOW = "document-window"
"""Name of the order."""

Packing = Literal["none", "pad", "split", "greedy", "first_fit", "best_fit"]


class DocumentWindowSection(Section):
    """How `order: document-window` cuts documents into windows, and fills rows of training.seq_length tokens."""

    window: Positive | None = None
    """Tokens of a window, bos and eos included; default: training.seq_length. A longer document is cut into several."""
    overlap: NonNegative = 0
    """Tokens of a document that a window shares with the one before it. (transformers calls this `stride`.)"""
    bos: NonNegative | None = None
    """Id of the token that is put before every window; default: none is."""
    eos: bool | NonNegative = False
    """Id of the token that is put behind every window; true: the tokenizer's end of document."""
    drop_eod: bool = False
    """Leave out the end of document with which every document ends in the shards, for example because eos puts one
    behind every window. A document without it ends the run."""
    mask_special: bool = False
    """The loss of predicting the eos of a window does not count. (Nothing predicts its bos.)"""
    packing: Packing = "best_fit"
    """What a row holds. none: one window, and padding; pad: the same, and no token attends to padding; split: windows
    one behind the other, cut where a row is full; greedy: windows in their order, as long as they fit; first_fit: each
    in the first row with room; best_fit: the longest first, each in the fullest row with room."""

    @model_validator(mode="after")
    def _overlap(self) -> Self:
        if self.window is not None:
            self.check(self.window)
        return self

    def check(self, window: int) -> None:
        """Raise ValueError if windows of so many tokens leave no text, or do not move on."""
        text = window - (self.bos is not None) - (self.eos is not False)
        if self.overlap >= text:
            raise ValueError(
                f"document_window.overlap {self.overlap} must be below the {max(text, 0)} tokens of text in a window "
                f"of {window}"
            )

    @property
    def packs(self) -> bool:
        """Whether rows come with the lengths of what they hold, which the attention keeps apart."""
        return self.packing != "none"
