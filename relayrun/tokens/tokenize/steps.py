"""Steps of datatrove between the readers and the writer of a shard: the `pipeline` of a data set's YAML, checked.

A step is a filter, an extractor, a formatter or a class of the user's own with datatrove's `run`. Datatrove's writers,
tokenizers, statistics and deduplication are refused: they work on files, or on many documents at a time. The `reader`
of the YAML is one of datatrove's that read file by file; the dumps say which files. `dedup.stats` has statistics.
This module imports datatrove on demand: a data set without steps never loads it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import pkgutil
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from relayrun.errors import ConfigError, InputError, did_you_mean

_REFUSED = {"dedup", "inference", "media", "readers", "stats", "tokens", "writers"}
"""Packages of `datatrove.pipeline` whose classes are no steps of a shard."""
_FOLDERS = {"reader": "data_folder", "stats": "output_folder"}
_FILES = *_FOLDERS.values(), "paths_file", "recursive", "glob_pattern", "shuffle_files", "limit", "skip"
"""Arguments of readers and statistics that choose files, or documents of them; a `step` has no folder."""
_WITH_WORDS = tuple(f"datatrove.pipeline.{each}" for each in ("filters.", "stats.word", "stats.sent", "stats.contam"))


def check_steps(pipeline: Sequence[Any], place: Callable[..., Any], *, reader: Any = None, stats: Any = ()) -> None:
    """Raise ConfigError for the first wrong step, the reader or wrong statistics, with the `place` of its setting.
    Makes no step: a constructor may download."""
    places: list[tuple[str, tuple[str, ...], Any]] = [] if reader is None else [("reader", ("reader",), reader)]
    places += [("step", ("pipeline", str(n)), entry) for n, entry in enumerate(pipeline)]
    places += [("stats", ("dedup", "stats", str(n)), entry) for n, entry in enumerate(stats)]
    before = []
    for kind, location, entry in places:
        try:
            name, given = name_and_arguments(entry)
            location = step = (*location, name)
            cls = _step_class(name, kind)
            if kind == "stats" and cls in before:
                raise InputError("this class is given twice, and would write the same files")
            before.append(cls)
            for argument, value in given.items():
                location = (*step, argument)
                if kind in _FOLDERS and argument in _FILES:
                    raise InputError("the dumps say which files are read, each as a whole; statistics go to `_stats`")
                _check_argument(cls, argument, value)
            location = step
            inspect.signature(cls).bind(**{_FOLDERS[kind]: ""} if kind in _FOLDERS else {}, **given)
            cls.__new__(cls)  # datatrove compares the packages that the class needs
            _word_tokenizer(cls, given)
        except (InputError, ImportError, TypeError, ValueError) as error:
            words, hint = (error.message, error.hint) if isinstance(error, InputError) else (str(error), None)
            raise ConfigError(f"{'.'.join(location)}: {words}", where=place(location), hint=hint) from None


def name_and_arguments(entry: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the arguments of a step as YAML gives it: `NAME`, or `NAME: {ARGUMENT: VALUE}`."""
    step = {entry: {}} if isinstance(entry, str) else entry
    if isinstance(step, Mapping) and len(step) == 1:
        ((name, given),) = step.items()
        if given is None or isinstance(given, Mapping):
            return str(name), given or {}
    raise InputError("a step is NAME, or NAME: {ARGUMENT: VALUE}", hint="begin each step with a dash of its own")


def build_step(entry: Any, kind: str = "step", folder: str = "") -> Any:
    """Return a new step of datatrove, a reader of files below `folder`, or statistics that are written there. Raises
    InputError if its class or its constructor refuses."""
    name, given = name_and_arguments(entry)
    cls, own = _step_class(name, kind), {_FOLDERS[kind]: folder} if kind in _FOLDERS else {}
    try:
        return cls(**own, **{argument: _value(cls, argument, value) for argument, value in given.items()})
    except (ImportError, OSError, TypeError, ValueError, AssertionError) as error:
        raise InputError(f"step {name} cannot be made: {type(error).__name__}: {error}") from None


def describe_steps(pipeline: Sequence[Any], reader: Any = None, stats: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the settings `pipeline`, and `reader` and `stats`, if given, of the record of a folder: name, class,
    versions and arguments of each step."""
    # a job may have other packages than the node that submitted it
    check_steps(pipeline, lambda location: None, reader=reader, stats=stats)
    found: dict[str, Any] = {"pipeline": [_describe(entry, "step") for entry in pipeline]}
    found |= {} if reader is None else {"reader": _describe(reader, "reader")}
    return found | ({"stats": [_describe(entry, "stats") for entry in stats]} if stats else {})


def _describe(entry: Any, kind: str) -> dict[str, Any]:
    name, given = name_and_arguments(entry)
    cls = _step_class(name, kind)
    functions = [value for each in given if callable(value := _value(cls, each, given[each]))]
    modules = [each.__module__ for each in (cls, *functions)]
    for needs in (getattr(base, "_requires_dependencies", []) for base in cls.__mro__):
        modules += [each if isinstance(each, str) else each[1] for each in needs]
    tokenizer = type(_word_tokenizer(cls, given)).__name__.removesuffix("Tokenizer").lower()
    modules += [tokenizer] if importlib.util.find_spec(tokenizer) else []  # spacy, nltk or stanza
    described = {"step": name, "class": f"{cls.__module__}.{cls.__qualname__}", "arguments": dict(given)}
    return described | {"versions": dict(map(_version, modules))}


def _version(module: str) -> tuple[str, str | None]:
    """Return package and version of a module, or else the module and the hash of its file."""
    package = module.partition(".")[0]
    try:
        return package, importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        file = getattr(pkgutil.resolve_name(module), "__file__", None)
        return module, None if file is None else "sha256:" + hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _step_class(name: str, kind: str) -> Any:
    from datatrove.pipeline.base import PipelineStep
    from datatrove.pipeline.readers.base import BaseDiskReader
    from datatrove.pipeline.stats.base import BaseStats

    base = {"reader": BaseDiskReader, "stats": BaseStats}.get(kind, PipelineStep)
    known = _short_names(kind)
    named = {cls.__name__: cls for cls in known.values()} | known
    if "." not in name and ":" not in name and name not in named:
        near = did_you_mean(name, known) or did_you_mean(name, named) or f"known: {', '.join(known)}"
        raise InputError(f"there is no {kind} {name!r}; {near}", hint="or write the import path of a class")
    cls = _imported(name) if "." in name or ":" in name else named[name]
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise InputError(f"this is no class of datatrove's {base.__name__}")
    modules = [base.__module__.split(".") for base in cls.__mro__]
    packages = {names[2] for names in modules if names[:2] == ["datatrove", "pipeline"]}
    if kind == "step" and (refused := packages & _REFUSED):
        hint = "a step sees one document at a time: a filter, an extractor, a formatter, or a class of your own"
        hint = "give it in `stats` of `dedup`, a stage of its own" if "stats" in refused else hint
        words = f"{cls.__name__} is one of datatrove's {refused.pop()}, which are no steps of a shard"
        raise InputError(words, hint=hint)
    return cls


def _short_names(kind: str) -> dict[str, Any]:
    """Return datatrove's classes of a kind by short name, GopherQualityFilter as `gopher_quality`."""
    from datatrove.pipeline import decont, extractors, filters, formatters, readers, stats

    found = {"decontamination": decont.NGramsDecontFilter} if kind == "step" else {}
    for module in {"reader": (readers,), "stats": (stats,)}.get(kind, (filters, formatters, extractors)):
        for name, cls in vars(module).items():
            if hasattr(cls, "run"):
                words = re.findall("[A-Z]+[0-9]+|[A-Z]+(?=[A-Z][a-z])|[A-Z][a-z]+", name)
                found["_".join(words if module is extractors else words[:-1]).lower()] = cls
    return found


def build_config(cls: Any, given: Mapping[str, Any]) -> Any:
    """Return a dataclass of datatrove's parameters. Raises InputError for an unknown parameter or a wrong type."""
    for argument, value in given.items():
        _check_argument(cls, argument, value)
    return cls(**{argument: _value(cls, argument, value) for argument, value in given.items()})


def find_word_tokenizer(language: str, *, sentences: bool = False) -> Any:
    """Return datatrove's word tokenizer of a language, or an object of the class at an import path, which splits
    `sentences`, too. Raises ImportError for a missing package, ValueError for an unknown language."""
    from datatrove.utils.word_tokenizers import load_word_tokenizer

    found = load_word_tokenizer(_imported(language)() if "." in language else language)
    for name in ("word_tokenize", *(("sent_tokenize", "span_tokenize") if sentences else ())):
        if not callable(function := getattr(found, name)):
            raise InputError(f"{type(found).__name__} has no function {name}")
        function("word")  # some load their package at the first word
    return found


def _imported(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except Exception as error:  # a module of the user's own may raise anything
        hint = "Python finds modules that are installed, or in PYTHONPATH (cluster.environment for jobs)"
        raise InputError(f"{path} cannot be imported: {error}", hint=hint) from None


def _value(cls: Any, argument: str, value: Any) -> Any:
    """Return the argument that a constructor gets: a function for its import path, an object for its parameters."""
    parameter = inspect.signature(cls).parameters.get(argument)
    if isinstance(value, Mapping) and dataclasses.is_dataclass(kind := _type_hints(cls).get(argument)):
        return build_config(kind, value)
    if argument == "language" and isinstance(value, str) and "." in value:
        return find_word_tokenizer(value)
    function = isinstance(value, str) and parameter is not None and "Callable" in str(parameter.annotation)
    return _imported(value) if function else value


def _type_hints(cls: Any) -> dict[str, Any]:
    with contextlib.suppress(NameError, TypeError):
        return typing.get_type_hints(cls.__init__)
    return {}


def _check_argument(cls: Any, argument: str, value: Any) -> None:
    if argument == "exclusion_writer":
        raise InputError("dropped documents go to the folder `exclusions` beside the shards")
    parameters = inspect.signature(cls).parameters
    known = [each for each in parameters if each != "exclusion_writer"]
    if argument not in known and not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        raise InputError(f"unknown argument; {did_you_mean(argument, known) or 'known: ' + ', '.join(known)}")
    with contextlib.suppress(NameError, TypeError, PydanticUserError):  # an annotation that cannot be compared
        kind = _type_hints(cls).get(argument, Any)
        try:
            if _value(cls, argument, value) is value:  # JSON: a list is a tuple, too
                adapter = TypeAdapter(kind | None, config=ConfigDict(arbitrary_types_allowed=True))
                adapter.validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            raise InputError(f"{error.errors()[0]['msg']}, not {value!r}") from None


def _word_tokenizer(cls: Any, given: Mapping[str, Any]) -> Any:
    """Return the word tokenizer that a class of datatrove loads for its language at its first document; None without.
    Raises as `find_word_tokenizer`."""
    parameter = inspect.signature(cls).parameters.get("language")
    if parameter is None or not cls.__module__.startswith(_WITH_WORDS):
        return None
    return find_word_tokenizer(given.get("language", parameter.default))
