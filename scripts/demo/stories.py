"""Generated stories for the demo, in English so plain that three million parameters learn it in minutes.

Each story follows one of a few plots; a seeded generator draws characters, places, lost things, helpers and the form of
each sentence. A model has something to learn at every scale: spelling, grammar, the pronoun of each name, and who the
story began with.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from relayrun.errors import InputError
from relayrun.lab.corpus import PARTS, is_heldout, write_parquet
from relayrun.publishing import published_folder

HELDOUT_SHARE = 0.01

SHE = ["Mira", "Lena", "Nora", "Ada", "Rosa", "Ella", "Ida", "Clara", "Greta", "Hanna", "Zoe", "Tilda"]
HE = ["Otto", "Finn", "Leo", "Hugo", "Emil", "Karl", "Jonas", "Max", "Theo", "Oskar", "Pip", "Sam"]
ANIMALS = ["fox", "rabbit", "bear", "mouse", "cat", "dog", "owl", "hedgehog", "squirrel", "beaver", "goat", "duck"]
HIDING = [
    "under the bridge",
    "behind the barn",
    "in the tall grass",
    "on the roof",
    "beside the well",
    "in a hollow tree",
    "under the stairs",
    "at the bottom of the garden",
]
KINDS = ["small", "young", "brave", "shy", "clever", "cheerful", "curious", "quiet"]
DRAWN = {
    "kind": KINDS,
    "kind2": KINDS,
    "place": [
        "by the river",
        "in an old mill",
        "at the edge of the forest",
        "on a green hill",
        "near the lake",
        "in a little village",
        "under a big oak",
        "behind the garden wall",
    ],
    "colour": ["red", "blue", "green", "yellow", "white", "black", "golden", "silver"],
    "thing": ["kite", "ball", "boat", "drum", "book", "lantern", "hat", "bell", "basket", "key", "scarf", "cup"],
    "time": ["One morning", "One day", "One windy evening", "Early on Sunday", "After breakfast", "On a cold day"],
    "gift": ["a slice of cake", "a bowl of soup", "some honey", "an apple", "a warm blanket", "a cup of tea"],
}
"""Choices for the words in braces. `generate_stories` chooses names, pronouns, animals and hiding places itself."""

OPENING = (
    "Once upon a time there was a {kind} {animal} named {hero} who lived {place}.",
    "There was once a {kind} {animal} who lived {place}. {Her} name was {hero}.",
    "{hero} was a {kind} {animal}. {She} lived {place}.",
)
OWNING = (
    "{She} had a {colour} {thing}, and {she} loved it more than anything.",
    "{Her} favourite thing was a {colour} {thing}.",
    "{She} had a {colour} {thing} that {her} grandmother had given {obj}.",
)
LOSS = (
    "{time} the {colour} {thing} was gone.",
    "{time} {hero} looked for {her} {thing}, but it was not there.",
    "{time} the wind took the {colour} {thing} and carried it away.",
)
SADNESS = (
    "{hero} was very sad and began to cry.",
    '"Where is my {thing}?" said {hero}.',
    "{She} looked everywhere, but {she} could not find it.",
)
FRIEND = (
    "Then {friend}, the {other}, came along and asked what was wrong.",
    "{Her} friend {friend}, a {kind2} {other}, heard {obj} and came to help.",
)
PROMISE = (
    '"Do not be sad, {hero}," said {friend}. "We will find it together."',
    '"I will help you," said {friend}.',
)
SEARCH = (
    "They looked {wrong}, but the {thing} was not there. Then they looked {hiding}.",
    "They walked all day. At last they came to a place {hiding}.",
)
FOUND = (
    "There was the {colour} {thing}!",
    "And there it was: the {colour} {thing} of {hero}!",
)
JOY = (
    '"Thank you, {friend}," said {hero}, and {she} gave {objf} {gift}.',
    "{hero} was so happy that {she} gave {friend} {gift}.",
)
ENDING = (
    "From that day on, {hero} and {friend} were best friends.",
    "Then they went home together and slept well.",
    "{hero} never lost {her} {thing} again.",
)
MEETING = (
    "{time} {she} met {friend}, a {kind2} {other}, who was sitting {hiding}.",
    "{time} a {kind2} {other} named {friend} knocked at {her} door.",
)
HUNGER = (
    '"I am so hungry," said {friend}. "I have not eaten all day."',
    "{friend} was cold and hungry.",
)
SHARING = (
    "{hero} went inside and came back with {gift}.",
    '"Wait here," said {hero}, and {she} brought {objf} {gift}.',
)
THANKS = (
    "{friend} ate it all up and smiled. In return {shef} gave {hero} a {colour} {thing}.",
    '"Thank you, {hero}," said {friend}. "Please take my {colour} {thing}."',
)
PLOTS = (
    (OPENING, OWNING, LOSS, SADNESS, FRIEND, PROMISE, SEARCH, FOUND, JOY, ENDING),
    (OPENING, OWNING, LOSS, FRIEND, PROMISE, SEARCH, FOUND, ENDING),
    (OPENING, MEETING, HUNGER, SHARING, THANKS, ENDING[:2]),
)
"""Each plot is a list of sentences, each with several forms."""


@dataclass(frozen=True, kw_only=True)
class StorySets:
    """The folders of `build_stories`, each of parquet files with a column `text`."""

    train: Path
    heldout: Path
    documents: int
    bytes: int
    """Bytes of all texts in `train`, as UTF-8."""


def build_stories(output: Path, *, megabytes: float = 8.0, seed: int = 0) -> StorySets:
    """Write `megabytes` million bytes of stories below `output`; about 1 in 100 is held out, chosen by its content.

    No story occurs twice. The same arguments give the same files.
    """
    train: list[str] = []
    heldout: list[str] = []
    size, seen = 0, set[bytes]()
    for text in generate_stories(seed):
        if size >= megabytes * 1e6:
            break
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen:
            continue
        seen.add(digest)
        if is_heldout(digest, HELDOUT_SHARE):
            heldout.append(text)
        else:
            train.append(text)
            size += len(text.encode())

    def check(found: Path) -> None:
        if others := {path.name for path in found.iterdir()} - {"train", "heldout"}:
            raise InputError(f"this folder holds something that is no story: {min(others)}", where=output)

    with published_folder(output, replaces=check) as building:
        for number in range(PARTS):
            write_parquet(building / "train" / f"part-{number:03d}.parquet", text=train[number::PARTS])
        write_parquet(building / "heldout" / "part-000.parquet", text=heldout)
    return StorySets(train=output / "train", heldout=output / "heldout", documents=len(train), bytes=size)


def generate_stories(seed: int) -> Iterator[str]:
    """Yield stories for ever; the same for the same seed."""
    draw = random.Random(seed)
    while True:
        plot = draw.choice(PLOTS)
        (hero, her), (friend, his) = _draw_character(draw), _draw_character(draw)
        while friend == hero:
            friend, his = _draw_character(draw)
        animal, other = draw.sample(ANIMALS, 2)
        wrong, hiding = draw.sample(HIDING, 2)
        words = {name: draw.choice(values) for name, values in DRAWN.items()} | {
            "hero": hero,
            "animal": animal,
            "friend": friend,
            "other": other,
            "wrong": wrong,
            "hiding": hiding,
            "she": her[0],
            "She": her[0].title(),
            "her": her[1],
            "Her": her[1].title(),
            "obj": her[2],
            "shef": his[0],
            "objf": his[2],
        }
        yield " ".join(draw.choice(forms).format(**words) for forms in plot)


def _draw_character(draw: random.Random) -> tuple[str, tuple[str, str, str]]:
    """A name, and its pronouns: subject, possessive, object."""
    if draw.random() < 0.5:
        return draw.choice(SHE), ("she", "her", "her")
    return draw.choice(HE), ("he", "his", "him")
