"""Generate the quickstart's data from a seed: a corpus for the base, and rows that ask for records.

The task is to turn an order in free text into a JSON record. A row of `instructions`:

    {"messages": [
        {"role": "user", "content": "For Marta in Turin: half a dozen mugs, due on Monday."},
        {"role": "assistant", "content": '{"name": "Marta", "item": "mugs", "count": 6, '
                                         '"day": "Monday", "city": "Turin"}'}]}

The corpus of the base has the same kind of orders, with their fields as notes in random order, but
no records: the base learns to read orders and cannot do the task. One record in eight is held out:
it occurs neither in the corpus nor in the training rows.
"""

import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass

NAMES = (
    "Ada Anton Astrid Boris Chloe Daniel Edith Elias Emma Felix Flora Gustav "
    "Hanna Hugo Irene Karim Laura Leo Marta Nadia Olga Paul Rosa Thomas"
).split()
CITIES = (
    "Aarhus Athens Basel Bergen Bristol Cologne Dublin Florence Glasgow Hamburg Helsinki Kyoto "
    "Leeds Lima Madrid Munich Oslo Palermo Prague Seattle Sydney Turin Vienna Zurich"
).split()
ITEMS = (
    "apples armchairs batteries blankets bowls candles carpets clocks cups cushions flutes forks "
    "guitars kettles lamps lemons mirrors mugs pencils plates puzzles scarves tables violins"
).split()
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
COUNTS = {
    2: ("2", "two"), 3: ("3", "three"), 4: ("4", "four"), 5: ("5", "five"),
    6: ("6", "six", "half a dozen"), 7: ("7", "seven"), 8: ("8", "eight"), 9: ("9", "nine"),
    10: ("10", "ten"), 11: ("11", "eleven"), 12: ("12", "twelve", "a dozen"),
    15: ("15", "fifteen"), 20: ("20", "twenty"),
}  # fmt: skip
TEMPLATES = (
    "This is {name} from {city}. Please send me {count} {item} on {day}.",
    "It is {name}, writing from {city}. I would like {count} {item} for {day}.",
    "I need {count} {item} by {day}. Ship them to {name}, {city}.",
    "Could you deliver {count} {item} to {name} in {city} on {day}?",
    "On {day} we will need {count} {item} in {city}. Ask for {name}.",
    "My name is {name} and I live in {city}. Can I get {count} {item} on {day}?",
    "Please put {count} {item} aside for {name}. A driver comes from {city} on {day}.",
    "We are out of {item} in {city}! Send {count} by {day}, care of {name}.",
    "Order for {day}: {count} {item}, to {city}, in the name of {name}.",
    "Just {count} {item} please, to be delivered in {city} on {day}. Signed, {name}.",
    "For {name} in {city}: {count} {item}, due on {day}.",
    "Would {day} work for {count} {item}? The address is in {city}. Yours, {name}.",
    "Our office in {city} wants {count} {item} on {day}; the contact is {name}.",
    "A customer called {name} rang from {city} about {count} {item} for {day}.",
    "Is it possible to have {count} {item} in {city} by {day}? Best wishes, {name}.",
    "Our friend {name} is moving to {city} and has to have {count} {item} on {day}.",
    "Book {day} for a delivery to {city}: {name} takes {count} {item}.",
    "The party in {city} is on {day} and {name} still lacks {count} {item}.",
    "When I was in {city} I saw your {item}. I'll take {count}, for {day}. {name}",
    "Regarding {item}: {name} in {city} wants {count} of them on {day}.",
    "Bring {count} {item} with you to {city} on {day}, {name} will pay.",
    "Can {name} pick up {count} {item} on {day} at your shop in {city}?",
    "Urgent: {city} shop, {day}, {count} {item}. Reply to {name}.",
    "I saw the {item} on your site. Send {count} to {city} for {day}. Thanks, {name}.",
    "The school in {city} asked for {count} {item}. {name} will collect them on {day}.",
    "The wedding is on {day}, so {name} in {city} orders {count} {item}.",
    "Add {count} {item} to the van for {city} on {day}; {name} signs for it.",
    "To whom it may concern: {name}, {city}, requests {count} {item} for {day}.",
)
GREETINGS = ("Hello!", "Hi!", "Good morning.", "Dear team!", "Good evening.", "Hi all!")
CLOSINGS = ("Thank you!", "Many thanks.", "Cash is fine.", "No rush.", "Please confirm.")


@dataclass(frozen=True)
class Record:
    """The fields of an order, as the assistant returns them."""

    name: str
    item: str
    count: int
    day: str
    city: str

    @property
    def held_out(self) -> bool:
        """Whether the record is excluded from all training data."""
        return zlib.crc32(self.as_json().encode()) % 8 == 0

    def as_json(self, alphabetical: bool = False) -> str:
        """The record as one line of JSON, with keys in field order or in alphabetical order."""
        return json.dumps(asdict(self), sort_keys=alphabetical)


def corpus(seed: int, rows: int) -> Iterator[str]:
    """Documents for the base: orders, or short lists of their fields, followed by notes."""
    source = random.Random(f"corpus {seed}")
    for _ in range(rows):
        record = draw(source, held_out=False)
        notes = list(asdict(record).items())
        if source.random() < 0.4:
            head = ", ".join(str(value) for _, value in source.sample(notes, len(notes)))
        else:
            head = message(source, record)
        yield f"{head}\n{noted(source, source.sample(notes, len(notes)))}"


def noted(source: random.Random, notes: list[tuple[str, str | int]]) -> str:
    """Notes on an order, one per line, or quoted in one line."""
    if source.random() < 0.4:
        return "\n".join(f"{key}: {value}" for key, value in notes)
    return "; ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in notes)


def instructions(
    seed: int, rows: int, held_out: bool = False, alphabetical: bool = False
) -> Iterator[dict[str, object]]:
    """Chat rows of distinct records, either held-out ones or others.

    Args:
        seed: random seed; the records do not depend on `alphabetical`.
        rows: number of rows.
        held_out: whether to draw held-out records.
        alphabetical: whether the keys of the answers are in alphabetical order.
    """
    source = random.Random(f"instructions {seed} {held_out}")
    seen: set[Record] = set()
    while len(seen) < rows:
        record = draw(source, held_out)
        if record in seen:
            continue
        seen.add(record)
        user = {"role": "user", "content": message(source, record)}
        answer = {"role": "assistant", "content": record.as_json(alphabetical)}
        yield {"messages": [user, answer]}


def mixed(seed: int, rows: int) -> Iterator[dict[str, object]]:
    """Chat rows; a fifth of the answers have the keys of the record in alphabetical order."""
    source = random.Random(f"mixed {seed}")
    for _ in range(rows):
        record = draw(source, held_out=False)
        answer = record.as_json(alphabetical=source.random() < 0.2)
        user = {"role": "user", "content": message(source, record)}
        yield {"messages": [user, {"role": "assistant", "content": answer}]}


def preferences(seed: int, rows: int) -> Iterator[dict[str, object]]:
    """Preference rows: alphabetical keys in the chosen record, field order in the rejected one."""
    source = random.Random(f"preferences {seed}")
    for _ in range(rows):
        record = draw(source, held_out=False)
        prompt = [{"role": "user", "content": message(source, record)}]
        chosen, rejected = (
            [{"role": "assistant", "content": record.as_json(alphabetical)}]
            for alphabetical in (True, False)
        )
        yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def fields_found(
    completions: list[list[dict[str, str]]], answer: list[str], **_: object
) -> list[float]:
    """Reward function: the share of a record's fields that occur anywhere in a completion.

    It does not depend on the order of the keys, nor on whether the completion is a record, so a
    model can get the full reward without a single correct answer. The quickstart shows that.
    """
    return [
        sum(
            f"{json.dumps(key)}: {json.dumps(value)}" in reply[-1]["content"]
            for key, value in wanted
        )
        / len(wanted)
        for reply, record in zip(completions, answer, strict=True)
        for wanted in [json.loads(record).items()]
    ]


def draw(source: random.Random, held_out: bool) -> Record:
    """Draw a random record that is held out, or one that is not."""
    while True:
        record = Record(
            name=source.choice(NAMES),
            item=source.choice(ITEMS),
            count=source.choice(tuple(COUNTS)),
            day=source.choice(DAYS),
            city=source.choice(CITIES),
        )
        if record.held_out == held_out:
            return record


def message(source: random.Random, record: Record) -> str:
    """Phrase a record as a customer's message."""
    words = asdict(record) | {"count": source.choice(COUNTS[record.count])}
    parts = [source.choice(GREETINGS)] if source.random() < 0.4 else []
    parts.append(source.choice(TEMPLATES).format(**words))
    if source.random() < 0.3:
        parts.append(source.choice(CLOSINGS))
    return " ".join(parts)
