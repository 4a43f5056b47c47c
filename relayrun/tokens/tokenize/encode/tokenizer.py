"""Prepare a Hugging Face tokenizer for documents: its ids, their fingerprint, and the framing of a document.

Ids are those of `tokenizers.Tokenizer.encode(text, add_special_tokens=False)` with `encode_special_tokens` on: text of
a special token stays text unless requested, and no template surrounds a document. Truncation, padding and dropout of a
tokenizer.json are off.

`ids_fingerprint` hashes the data that decides ids: the model (vocabulary, merges or scores), the normalizer, the
pre-tokenizer and the added tokens. Truncation, padding, templates and the decoder do not count, nor whether an added
token is special: a dump made with `--special-text` has the same vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, WordLevel

from relayrun.control.trainers.pickle_records import no_collection
from relayrun.errors import InputError, did_you_mean_path
from relayrun.tokens.shards.shard import token_dtype
from relayrun.tokens.stores.urls import first_line
from relayrun.tokens.tokenize.encode import tokenizer_files
from relayrun.tokens.tokenize.encode.tokenizer_files import check_convertible, refuse_unconvertible
from relayrun.tokens.tokenize.options import AppendEod, TokenizeOptions
from relayrun.trust import read_cache, write_cache

_LONG_TEXT_IDS = 2000
"""Mean ids of a text from which a copy of each costs less than a mask over all ids."""


@dataclass(frozen=True, kw_only=True)
class DocumentFraming:
    """Ids before and after every document, the type of the ids, and the treatment of a document without ids. A kept
    empty document gets neither BOS nor EOD, as in Megatron-LM's `preprocess_data.py`."""

    bos_id: int | None
    eod_id: int | None
    dtype: str
    """Name of the numpy type of a shard's ids."""
    keep_empty: bool

    def apply(
        self,
        ids: npt.NDArray[np.uint32],
        lengths: npt.NDArray[np.int64],
        room: Callable[[int], npt.NDArray[np.generic]] | None = None,
    ) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.int64]]:
        """Return the framed `ids` [tokens] and `lengths` [documents] for the shard. `room` allocates the ids' array."""
        if not self.keep_empty:
            lengths = lengths[lengths > 0]
        inside = lengths > 0
        framed = lengths + inside * ((self.bos_id is not None) + (self.eod_id is not None))
        ends = np.cumsum(framed)
        total = int(framed.sum())
        out = np.empty(total, self.dtype) if room is None else room(total)
        places = ((self.bos_id, (ends - framed)[inside]), (self.eod_id, ends[inside] - 1))
        specials = [(token, at) for token, at in places if token is not None]
        for token, at in specials:
            out[at] = token
        if len(ids) > _LONG_TEXT_IDS * len(lengths):
            begins = ends - framed + (self.bos_id is not None) * inside
            for begin, taken, size in np.stack([begins, np.cumsum(lengths) - lengths, lengths], 1).tolist():
                out[begin : begin + size] = ids[taken : taken + size]
        else:
            text = np.ones(total, np.bool_)
            for _, at in specials:
                text[at] = False
            out[text] = ids
        return out, framed


@no_collection()
def ids_fingerprint(definition: str) -> str:
    """Return the SHA-256, hexadecimal, of the data that decides ids in a serialized tokenizer (`Tokenizer.to_str`)."""
    tokenizer = json.loads(definition)
    parts = {name: tokenizer.get(name) for name in ("model", "normalizer", "pre_tokenizer", "added_tokens")}
    for token in parts["added_tokens"] or ():
        token.pop("special", None)
    model = parts["model"] or {}
    # half a million lists and names without null and false: searching them takes a second
    large = {name: model.pop(name) for name in ("vocab", "merges") if name in model}
    if any(isinstance(pair, str) for pair in large.get("merges", ())[:1]):  # files of older versions of tokenizers
        large["merges"] = [pair.split(" ", 1) for pair in large["merges"]]  # which does not read a list of both kinds
    if isinstance(vocabulary := large.get("vocab"), dict):  # sorted by names: `dumps` would compare pairs
        large["vocab"] = {name: vocabulary[name] for name in sorted(vocabulary)}
    said = _without_nulls(parts)
    if large:
        said["model"] |= large
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _without_nulls(value: Any) -> Any:
    """Drop null and false: newer versions of the library write more of them."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None and part is not False}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


log = logging.getLogger(__name__)

_USUAL_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|endofdocument|>")


def load_definition(definition: str) -> Tokenizer:
    """Load a serialized tokenizer; the text of a special token stays text."""
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.encode_special_tokens = True
    return tokenizer


@dataclass(frozen=True, kw_only=True)
class DocumentTokenizer:
    """A tokenizer and the tokens that end, and begin, a document."""

    definition: str
    """The serialized tokenizer, as `tokenizers` writes it."""
    fingerprint: str
    """The sha256 of the definition: equal for equal ids."""
    ids_fingerprint: str
    """Hash of the data that decides ids."""
    eos_token: str | None
    """None if no token ends documents."""
    eos_id: int | None
    bos_id: int | None
    """None if no token begins documents."""
    size: int
    """Entries with the added tokens, `len(tokenizer)`; at least the largest id + 1, also if ids have holes."""

    @property
    def dtype(self) -> type[np.generic]:
        """The numpy type of the ids in a shard, by Megatron's rule."""
        return token_dtype(self.size)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded at the first access: a large one takes a second."""
        return load_definition(self.definition)

    def framing(self, *, keep_empty: bool) -> DocumentFraming:
        return DocumentFraming(bos_id=self.bos_id, eod_id=self.eos_id, dtype=self.dtype.__name__, keep_empty=keep_empty)


def load_tokenizer(options: TokenizeOptions) -> DocumentTokenizer:
    """Load a tokenizer.json file, a folder that holds one, or a name on the Hugging Face hub, as `options` say.

    A folder without a tokenizer.json is converted, if that is exact (see `tokenizer_files`).

    The EOS is `eos_token`, or the one in the configuration beside the tokenizer, or the only usual name among its
    special tokens; without any, `append_eod` "yes" is an error and "auto" a warning. The configuration names the BOS.
    Files of the hub are downloaded once per node; the hub's token comes from the environment. Raises InputError if the
    tokenizer, EOS, BOS or token is missing.
    """
    path = Path(options.tokenizer)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        return _prepare(_convert_or_fetch(path, file, options), options)
    data, configured = file.read_bytes(), [_read_configured(file.parent, name) for name in _CONFIGURED]
    asked = (options.eos_token, options.append_eod, options.bos, options.special_text, *configured)
    key = tokenizer_files.cache_key("tokenizer", (data, repr(asked).encode()), ("tokenizers",))
    if (known := read_cache("tokenizers", key)) is not None:
        first, _, definition = known.decode().partition("\n")
        return DocumentTokenizer(definition=definition, **json.loads(first))
    return _prepare(_from_file(file, data, *configured), options, key)


def first_token(name: str) -> int | None:
    """Return the token with which a tokenizer begins a text: its template's, or that of `add_bos_token`."""
    options, path = TokenizeOptions(tokenizer=name, append_eod="no"), Path(name)
    # the template around a vocabulary of one token: a large one takes a second to load
    small = json.loads(Tokenizer(WordLevel({"a": 0}, unk_token="a")).to_str())
    small["post_processor"] = json.loads(load_tokenizer(options).definition)["post_processor"]
    framed = Tokenizer.from_str(json.dumps(small)).encode("a")
    if framed.special_tokens_mask[:1] == [1]:
        return int(framed.ids[0])
    with contextlib.suppress(InputError):  # it names no such token
        if _read_configured(path if path.is_dir() else path.parent, "add_bos_token"):
            return load_tokenizer(options.model_copy(update={"bos": True})).bos_id
    return None


@dataclass(frozen=True)
class _FoundTokenizer:
    """A tokenizer, the tokens that its configuration names, and the entries that transformers counts."""

    tokenizer: Tokenizer
    eos: str | None
    bos: str | None
    size: int = 0


def _convert_or_fetch(path: Path, file: Path, options: TokenizeOptions) -> _FoundTokenizer:
    """Return the tokenizer of a folder without `file`, a tokenizer.json, or of the hub. Raises InputError."""
    name = options.tokenizer
    if path.is_dir():
        check_convertible(path)
        found = _from_transformers(os.path.abspath(path), options.cache_dir)
        log.warning("%s: there is no tokenizer.json; transformers converted the tokenizer", path)
        return found
    if path.suffix == ".json" or not tokenizer_files.is_hub_name(name):
        hint = did_you_mean_path(file) or tokenizer_files.USUAL_HINT
        raise InputError("there is no such tokenizer file", where=file, hint=hint)
    here = tokenizer_files.check_hub(name, options.cache_dir)
    # the file itself, as from a folder: transformers' classes may put their own normalizer or splitting in its place
    if (folder := tokenizer_files.fetch_tokenizer_json(name, options.cache_dir, only_here=here)) is not None:
        file = folder / "tokenizer.json"
        return _from_file(file, file.read_bytes(), *(_read_configured(folder, name) for name in _CONFIGURED))
    return _from_transformers(name, options.cache_dir, only_here=here)


def _prepare(found: _FoundTokenizer, options: TokenizeOptions, key: str | None = None) -> DocumentTokenizer:
    """Apply the options, and cache the result as `key` unless a warning has to be repeated at each start."""
    where, tokenizer = options.tokenizer, found.tokenizer
    eos_token = _find_eos(tokenizer, options.eos_token or found.eos, options.append_eod, where)
    eos_id = tokenizer.token_to_id(eos_token) if eos_token is not None else None
    if eos_token is not None and eos_id is None:
        hint = "name one of its tokens with --eos-token"
        raise InputError(f"the tokenizer has no token {eos_token!r} to end documents with", where=where, hint=hint)
    bos_id = tokenizer.token_to_id(found.bos) if options.bos and found.bos is not None else None
    if options.bos and bos_id is None:
        hint = "leave --bos out, or put a bos_token into its tokenizer_config.json"
        raise InputError("the tokenizer names no token to begin documents with", where=where, hint=hint)
    random = _switch_off_dropout(tokenizer, where)
    if options.special_text:  # not special: every engine encodes their text as their ids
        known = json.loads(tokenizer.to_str())
        for token in known["added_tokens"]:
            token["special"] = False
        tokenizer = Tokenizer.from_str(json.dumps(known))
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    definition = str(tokenizer.to_str())
    facts: dict[str, Any] = {
        "fingerprint": hashlib.sha256(definition.encode()).hexdigest(),
        "ids_fingerprint": ids_fingerprint(definition),
        "eos_token": eos_token,
        "eos_id": eos_id,
        "bos_id": bos_id,
        "size": max(found.size, len(vocabulary), max(vocabulary.values()) + 1),
    }
    warned = random or (eos_token is None and options.append_eod != "no")
    if key is not None and not warned:
        write_cache("tokenizers", key, f"{json.dumps(facts)}\n{definition}".encode())
    loaded = DocumentTokenizer(definition=definition, **facts)
    loaded.__dict__["tokenizer"] = tokenizer  # saves loading it again
    return loaded


def _switch_off_dropout(tokenizer: Tokenizer, where: str) -> bool:
    dropout = isinstance(tokenizer.model, BPE) and tokenizer.model.dropout
    if dropout:
        why = "merges left out at random would give a text other ids each time"
        log.warning("%s: its dropout %g is switched off: %s", where, dropout, why)
        tokenizer.model.dropout = None
    return bool(dropout)


def _find_eos(tokenizer: Tokenizer, named: str | None, append_eod: AppendEod, where: str) -> str | None:
    if append_eod == "no":
        return None
    if named is not None:
        return named
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    found = [token for token in _USUAL_EOS if token in special]
    if len(found) == 1:
        return found[0]
    what = f"has several that could be it: {', '.join(found)}" if found else "names none"
    words = f"which token ends a document? The tokenizer {what}"
    if append_eod == "yes":
        raise InputError(words, where=where, hint="name it with --eos-token")
    log.warning("no token will stand between documents: %s", words)
    return None


def _from_file(file: Path, data: bytes, eos: str | None, bos: str | None, listed: Any) -> _FoundTokenizer:
    """Load a tokenizer.json. If the configuration alone lists its EOS or BOS, `listed` tokens are added, as by
    transformers, unless that would give them other ids."""
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises Exception itself
        refuse_unconvertible(file)
        hint = "fetch or save it again; a vocab.json, .gguf or tekken.json has to be converted to a tokenizer.json"
        raise InputError(f"not a tokenizer.json of the tokenizers library: {error}", where=file, hint=hint) from None
    try:
        new = {int(id_): AddedToken(**token) for id_, token in (listed or {}).items()}
        new = {id_: new[id_] for id_ in sorted(new) if tokenizer.token_to_id(new[id_].content) is None}
    except (AttributeError, TypeError, ValueError):
        raise InputError("added_tokens_decoder lists no tokens by id", where=file.parent) from None
    if {eos, bos} & {token.content for token in new.values()}:
        more = Tokenizer.from_buffer(data)
        for token in new.values():
            (more.add_special_tokens if token.special else more.add_tokens)([token])
        tokenizer = more if all(more.token_to_id(token.content) == id_ for id_, token in new.items()) else tokenizer
    return _FoundTokenizer(tokenizer, eos, bos)


def _from_transformers(name: str, cache_dir: str | None, *, only_here: bool = False) -> _FoundTokenizer:
    from transformers import AutoTokenizer  # seconds to import, and needed for hub names only

    try:
        # never run, nor ask about, code that comes with a tokenizer
        loaded: Any = AutoTokenizer.from_pretrained(
            name, cache_dir=cache_dir, trust_remote_code=False, local_files_only=only_here
        )
    except Exception as error:  # OSError, ValueError, ImportError, ...
        hint = tokenizer_files.USUAL_HINT
        raise InputError(f"no such tokenizer: {first_line(error)}", where=name, hint=hint) from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        hint = "take a tokenizer.json of the same model"
        raise InputError("this tokenizer has no fast version (no tokenizer.json)", where=name, hint=hint)
    return _FoundTokenizer(Tokenizer.from_str(backend.to_str()), loaded.eos_token, loaded.bos_token, len(loaded))


_CONFIGURED = ("eos_token", "bos_token", "added_tokens_decoder")


def _read_configured(folder: Path, setting: str) -> Any:
    """Read a setting of a tokenizer, as transformers writes it; a token is text, or an object with `content`."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            value = json.loads((folder / name).read_text(encoding="utf-8")).get(setting)
        except FileNotFoundError:
            continue
        except (ValueError, AttributeError):
            raise InputError("not a JSON object", where=folder / name) from None
        value = value.get("content", value) if isinstance(value, dict) else value
        if isinstance(value, {"added_tokens_decoder": dict, "add_bos_token": bool}.get(setting, str)):
            return value
    return None
