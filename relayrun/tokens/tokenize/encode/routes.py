"""A fast engine for most texts of a tokenizer, and the reference for the others, as its `Plan` says."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from relayrun.tokens.readers.texts import Texts
from relayrun.tokens.tokenize.encode.added import AddedTokenEngine
from relayrun.tokens.tokenize.encode.characters import (
    FIRST_UNASSIGNED_LEAD,
    texts_holding,
    texts_holding_bytes,
    unassigned_table,
)
from relayrun.tokens.tokenize.encode.digits import DigitEngine
from relayrun.tokens.tokenize.encode.families import EnginePlan, UnicodeForm
from relayrun.tokens.tokenize.encode.libraries import Encoded, Engine

_FIRST_CHANGED_LEAD: dict[UnicodeForm, int] = {"NFC": 0xCC, "NFD": 0xC3, "NFKC": 0xC2, "NFKD": 0xC2}
"""Lead byte of the first character that the form changes, alone or behind another."""


class RoutingRules:
    """Which texts an engine may not have."""

    def __init__(self, plan: EnginePlan) -> None:
        late = "".join(point for point in plan.doubtful if point.encode()[0] >= FIRST_UNASSIGNED_LEAD)
        self._table = unassigned_table(late)
        self._early = tuple(point.encode() for point in plan.doubtful if point not in late)
        forms = {form for form in (plan.normalize,) if form}
        plain = {*plan.plain, *(unicodedata.normalize(form, token) for form in forms for token in plan.plain)}
        self._plain = tuple(sorted(token.encode() for token in plain if token))

    def elsewhere(self, texts: Texts) -> npt.NDArray[np.bool_]:
        """Which texts the engine may not have, shape [texts]."""
        routed = texts_holding(texts, self._table, FIRST_UNASSIGNED_LEAD)
        return routed | texts_holding_bytes(texts, (*self._early, *self._plain))


class RoutedEngine:
    """A fast engine for most texts, and the reference for those that it is not trusted with."""

    def __init__(
        self,
        fast: Engine,
        plan: EnginePlan,
        normalizer: Callable[[], Callable[[str], str]],
        other: Callable[[], Engine],
    ) -> None:
        """`normalizer`, which makes the tokenizer's own, and `other` are called when the first text needs them."""
        self.routed = 0
        self._fast = fast
        if plan.digits:
            self._fast = DigitEngine(fast, each=plan.digits == "each")
        elif plan.cut:
            self._fast = AddedTokenEngine(fast, plan.cut, plan.special)
        self._plan, self._route = plan, RoutingRules(plan)
        self._make_normalizer, self._make_other = normalizer, other
        self._normalizer: Callable[[str], str] | None = None
        self._other: Engine | None = None

    def encode(self, texts: Texts) -> Encoded:
        elsewhere = self._route.elsewhere(texts)
        kept = texts.take(~elsewhere) if elsewhere.any() else texts
        if self._plan.normalize is not None:
            kept, unsure = self._normalized(kept, self._plan.normalize)
            if unsure.any():
                elsewhere[np.flatnonzero(~elsewhere)[unsure]] = True
                kept = kept.take(~unsure)
        if not elsewhere.any():
            return self._fast.encode(kept)
        self._other = self._other or self._make_other()
        self.routed += int(elsewhere.sum())
        fast_ids, fast_lengths = self._fast.encode(kept)
        other_ids, other_lengths = self._other.encode(texts.take(elsewhere))
        lengths = np.empty(len(texts), np.int64)
        lengths[~elsewhere], lengths[elsewhere] = fast_lengths, other_lengths
        ids = np.empty(int(lengths.sum()), np.uint32)
        from_other = np.repeat(elsewhere, lengths)
        ids[~from_other], ids[from_other] = fast_ids, other_ids
        return ids, lengths

    def _normalized(self, texts: Texts, form: UnicodeForm) -> tuple[Texts, npt.NDArray[np.bool_]]:
        """The texts as the tokenizer's own normalizer makes them, and which of them the engine may not have then.

        Where Python says that a text is in the form, the normalizer leaves it: both know all its characters, and
        what Unicode says of an assigned character's normal form never changes.
        """
        suspect = np.flatnonzero(texts.highest() >= _FIRST_CHANGED_LEAD[form])
        new: dict[int, bytes] = {}
        for index in suspect.tolist():
            begin, end = texts.offsets[index : index + 2]
            text = str(texts.data[begin:end].data, "utf-8")
            if not unicodedata.is_normalized(form, text):
                self._normalizer = self._normalizer or self._make_normalizer()
                new[index] = self._normalizer(text).encode()
        unsure = np.zeros(len(texts), np.bool_)
        if not new:
            return texts, unsure
        pieces = [new.get(index, view) for index, view in enumerate(texts.views())]
        offsets = np.zeros(len(pieces) + 1, np.int64)
        np.cumsum([len(piece) for piece in pieces], out=offsets[1:])
        made = Texts(data=np.frombuffer(b"".join(pieces), np.uint8), offsets=offsets)
        unsure[[*new]] = True
        unsure[unsure] = self._route.elsewhere(made.take(unsure))
        return made, unsure
