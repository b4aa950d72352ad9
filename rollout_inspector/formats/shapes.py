"""Checks of foreign JSON values, each with a sentence that names the field."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np

from rollout_inspector.formats import limits
from rollout_inspector.formats.containers.json_text import canonical_json
from rollout_inspector.formats.containers.refusals import BadLine
from rollout_inspector.streams.trajectory import NO_IDS, Floats, Ids, Mask, Message

MAX_DEPTH = 100
"""Deepest nesting of a line. No rollout is nested deeper, and later readers would exceed the recursion limit."""
MAX_NUMBER = float(np.finfo(np.float32).max)
"""Largest reward, setting or log-probability: means and deviations are computed from them."""
_NUMBERS = {int, float}
NOT_FINITE = {"nan": math.nan, **dict.fromkeys(("infinity", "+infinity", "inf", "+inf"), math.inf),
              **dict.fromkeys(("-infinity", "-inf"), -math.inf)}
"""What JSON has no number for, as writers spell it in a text; in small letters."""
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escaped surrogate, perhaps half a character. Unlike the decoder of other lines, Python's accepts a lone one."""


_decoder = msgspec.json.Decoder()


def decode(data: bytes) -> Any:
    """A line's JSON value. Raises :class:`BadLine`."""
    try:
        value = _decoder.decode(data)
    except UnicodeDecodeError:
        raise BadLine("The line is not UTF-8 text.") from None
    except RecursionError:
        raise BadLine(f"The JSON is nested more than {MAX_DEPTH} deep.") from None
    except msgspec.ValidationError as error:
        raise BadLine(f"The line holds a value that cannot be kept: {error}.") from None
    except msgspec.DecodeError as error:
        value = _with_nan(data)
        if value is None:
            raise BadLine(f"The line is not valid JSON: {error}.") from None
    if is_deeper(value, MAX_DEPTH):
        raise BadLine(f"The JSON is nested more than {MAX_DEPTH} deep.")
    return value


def _with_nan(data: bytes) -> Any:
    """The value of a line in which Python wrote NaN or Infinity, read as null; None = the line has another fault."""
    if b"NaN" not in data and b"Infinity" not in data:
        return None
    try:
        value = json.loads(data, parse_constant=lambda _: None, parse_float=_finite)
        if _HALF.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadLine("The line holds half a character (a lone surrogate), which no text can keep.") from None
    except (ValueError, RecursionError):
        return None
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def is_deeper(value: Any, limit: int) -> bool:
    """Whether lists and objects nest deeper than ``limit``."""
    level: list[Any] = [value]
    for _ in range(limit + 1):
        below: list[Any] = []
        for item in level:
            if type(item) is dict:
                below.extend(child for child in item.values() if type(child) in (dict, list))
            elif type(item) is list and not set(map(type, item)) <= _NUMBERS:
                below.extend(child for child in item if type(child) in (dict, list))
        if not below:
            return False
        level = below
    return True


def mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadLine(f"{where} must be a JSON object, not {_name(value)}.")
    return value


def optional_mapping(value: Any, where: str) -> dict[str, Any]:
    """Null and missing count as empty."""
    return {} if value is None else mapping(value, where)


def sequence(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadLine(f"{where} must be a list, not {_name(value)}.")
    return value


def ids(value: Any, where: str) -> Ids:
    """Token ids: whole numbers from 0 to 2147483647. ``5.0`` is one, because data frames write so. An array was checked
    before (``rollout_inspector.formats.prompts``)."""
    if isinstance(value, np.ndarray):
        return value
    items = sequence(value, where)
    if not items:
        return NO_IDS
    if set(map(type, items)) != {int}:
        place = next((n for n, item in enumerate(items) if not _is_whole(item)), None)
        if place is None:
            return ids([int(item) for item in items], where)
        raise BadLine(f"{where} must hold token ids; element {place} is {_name(items[place])}.")
    try:
        array = np.array(items, dtype=np.int64)
    except OverflowError:
        array = None
    if array is None or int(array.min()) < 0 or int(array.max()) >= 2**31:
        place = next(n for n, item in enumerate(items) if not 0 <= item < 2**31)
        token_text = items[place] if abs(items[place]) < 10**20 else "a huge number"
        raise BadLine(f"{where} must hold token ids from 0 to 2147483647; element {place} is {token_text}.")
    return array.astype(np.int32)


def _is_whole(value: Any) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())


def optional_ids(value: Any, where: str) -> Ids:
    """Null and missing count as empty."""
    return NO_IDS if value is None else ids(value, where)


def floats(value: Any, where: str) -> Floats:
    """Numbers as float32. Null and ``NOT_FINITE`` are what JSON cannot hold; null becomes NaN. An array was checked
    before (``rollout_inspector.formats.prompts``)."""
    if isinstance(value, np.ndarray):
        return value
    items = sequence(value, where)
    if not set(map(type, items)) <= _NUMBERS:
        numbers = [float_of(item) for item in items]
        if (place := next((n for n, number in enumerate(numbers) if number is None), None)) is not None:
            raise BadLine(f"{where} must hold numbers; element {place} is {_name(items[place])}.")
        items = numbers
    return _float_array(items, where)


def float_of(item: Any) -> float | None:
    """An element of :func:`floats`; None = it is none."""
    if item is None:
        return math.nan
    if isinstance(item, str):
        return NOT_FINITE.get(item.lower()) if len(item) < 10 else None
    return item if type(item) in _NUMBERS else None


def _float_array(items: list[Any], where: str) -> Floats:
    try:
        with np.errstate(over="raise"):
            return np.array(items, dtype=np.float64).astype(np.float32)
    except (OverflowError, FloatingPointError):
        raise BadLine(f"{where} holds a number that does not fit into 32 bits.") from None


def optional_floats(value: Any, where: str) -> Floats | None:
    return None if value is None else floats(value, where)


def after(n: int, values: Floats | None) -> Floats | None:
    """A column of the response as a column of the row: nothing is known of the first ``n`` tokens."""
    return None if values is None else np.concatenate([np.full(n, np.nan, dtype=np.float32), values])


def mask(value: Any, where: str) -> Mask:
    """0, 1, true and false."""
    items = sequence(value, where)
    if not set(map(type, items)) <= {int, float, bool}:
        place = next(n for n, item in enumerate(items) if type(item) not in (int, float, bool))
        raise BadLine(f"{where} must hold 0 and 1; element {place} is {_name(items[place])}.")
    if not set(items) <= {0, 1}:
        place = next(n for n, item in enumerate(items) if item not in (0, 1))
        raise BadLine(f"{where} must hold 0 and 1; element {place} is {str(items[place])[:30]}.")
    return np.array(items, dtype=np.bool_)


_notes: ContextVar[dict[str, str] | None] = ContextVar("notes", default=None)
MAX_ERROR = 1000  # Characters of the error of an episode.
MAX_NOTES = 50  # Notes of one line. A hostile line has a bad field in each of its steps.


@contextmanager
def noting() -> Iterator[dict[str, str]]:
    """What was left out or cut of the metadata that is read in this context: by field, a sentence each."""
    notes: dict[str, str] = {}
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def note(where: str, why: str) -> None:
    """Say that a field of metadata could not be kept whole. ``why``: a sentence."""
    notes = _notes.get()
    if notes is not None and len(notes) < MAX_NOTES:
        notes.setdefault(where[:200], why[:300])


def with_notes(extra: Mapping[str, Any], notes: Mapping[str, str]) -> Mapping[str, Any]:
    """Further fields, with the notes under ``left_out``."""
    before = extra.get("left_out")
    return {**extra, "left_out": {**(before if isinstance(before, dict) else {}), **notes}} if notes else extra


def spare(read: Callable[..., Any], value: Any, where: str, **options: Any) -> Any:
    """What ``read`` makes of a field of metadata; None, with a note, where it refuses it."""
    try:
        return read(value, where, **options)
    except BadLine as error:
        note(where, str(error))
        return None


def text(value: Any, where: str, limit: int) -> str:
    """A short text that a database column can hold; null and missing count as empty. It is metadata, so nothing is
    refused: another value is left out, and a long text is cut and keeps a hash, so that two long names stay two. Both
    with a note."""
    if value is None:
        return ""
    if _is_whole(value):
        value = int(value)
        value = str(value) if abs(value) < 10**30 else hex(value)
    if not isinstance(value, str):
        note(where, f"{where} must be a text, not {_name(value)}.")
        return ""
    if "\0" in value:
        note(where, f"{where} holds the character U+0000.")
        value = value.replace("\0", "\ufffd")
    if len(value) > limit:
        note(where, f"{where} is longer than {limit} characters.")
        value = f"{value[: limit - 9]}~{sha256(value.encode()).hexdigest()[:8]}"
    return value


def error_text(value: Any) -> str:
    """The error of an episode in words: a text, or an object with its type and message; empty = there is none."""
    if isinstance(value, list):
        value = next((item for item in value if item), None)
    if isinstance(value, dict) and value:
        names = ("type", "exception_type", "error_type", "code", "message", "exception_message", "error")
        parts = [value[name] for name in names if isinstance(value.get(name), str) and value[name]]
        value = ": ".join(dict.fromkeys(parts)) or canonical_json(value)
    return value[:MAX_ERROR].replace("\0", "\ufffd") if isinstance(value, str) else ""


def optional_string(value: Any, where: str) -> str | None:
    """A text of any length, or None."""
    if value is not None and not isinstance(value, str):
        raise BadLine(f"{where} must be a text, not {_name(value)}.")
    return value


def number(value: Any, where: str) -> float | None:
    """A number of at most ``MAX_NUMBER``, or None for one that is not finite. Raises :class:`BadLine`."""
    if value is None:
        return None
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and float_of(value) is not None:
        return None  # as NaN without quotation marks
    if not isinstance(value, int | float):
        raise BadLine(f"{where} must be a number, not {_name(value)}.")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not abs(result) <= MAX_NUMBER:
        raise BadLine(f"{where} is a number that does not fit into 32 bits.")
    return result


def whole(value: Any, where: str, least: int = -(2**31)) -> int | None:
    """A whole number of 32 bits, or None."""
    if value is None:
        return None
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int:
        raise BadLine(f"{where} must be a whole number, not {_name(value)}.")
    if not least <= value < 2**31:
        raise BadLine(f"{where} is out of range.")
    return value


def numbers_by_name(value: Any, where: str, read: Callable[[Any, str], float | None] = number) -> dict[str, float]:
    """Numbers by name. A null is left out."""
    numbers = {}
    for name, item in optional_mapping(value, where).items():
        key = text(name, f"a name in {where}", 200)
        parsed = read(item, f"{where}.{key}")
        if parsed is not None:
            numbers[key] = parsed
    return numbers


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal as JSON: there 1, 1.0 and true differ, in Python they are equal."""
    return bool(left == right) and canonical_json(left) == canonical_json(right)


def messages(value: Any, where: str) -> tuple[Message, ...]:
    """Chat messages: objects, each with a role."""
    items = sequence(value, where)
    for n, item in enumerate(items):
        if not isinstance(mapping(item, f"{where}[{n}]").get("role"), str):
            raise BadLine(f"{where}[{n}] has no role.")
    return tuple(items)


def optional_tools(value: Any, where: str) -> tuple[Mapping[str, Any], ...] | None:
    if value is None:
        return None
    return tuple(mapping(item, f"{where}[{n}]") for n, item in enumerate(sequence(value, where)))


def rest(value: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """The fields of an object that are not ``known``. They are kept without their meaning."""
    skip = frozenset(known)
    return {key: item for key, item in value.items() if key not in skip}


def elements(value: Mapping[str, Any], known: Iterable[str], n: int) -> Callable[[int], dict[str, Any]]:
    """Further fields of a batch of ``n``: a function from an index to the fields of that element. Each element gets its
    own of a list of ``n``, and any other value whole. Empty ones are left out."""
    fields = rest(value, known)
    lists = {key for key, item in fields.items() if isinstance(item, list) and len(item) == n}
    limits.current().check_repeated(rest(fields, lists), n, "trajectories")

    return lambda i: filled({key: item[i] if key in lists else item for key, item in fields.items()})


def filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that hold something."""
    return {key: item for key, item in fields.items() if item not in (None, {}, [])}


def rows_of_batch(
    value: Any, number: int, of: str, known: Sequence[str], outcomes: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The rows of a line that is one row or a collated batch: their names, their known fields, and further fields.
    ``of``: the field with the ids. ``outcomes``: single values, which one row may have in a list."""
    value = mapping(value, "The line")
    ids = sequence(value.get(of), of)
    is_batch = bool(ids) and isinstance(ids[0], list)
    n = len(ids) if is_batch else 1
    columns: dict[str, Sequence[Any]] = {}
    for name in (*known, *outcomes):
        if (item := value.get(name)) is not None:
            has_elements = is_batch or (name in outcomes and isinstance(item, list))
            columns[name] = sequence(item, name) if has_elements else [item]
            if len(columns[name]) != n:
                raise BadLine(f"{name} has {len(item)} elements for {n} {of}.")
    names = (*known, *outcomes)
    further = elements(value, names, n) if is_batch else lambda _: filled(rest(value, names))
    for i in range(n):
        name = f"line-{number}-{i}" if is_batch else f"line-{number}"
        yield name, {key: items[i] for key, items in columns.items()}, further(i)


def _name(value: Any) -> str:
    return {
        type(None): "null", bool: "true or false", int: "a number", float: "a number with a fraction", str: "a text",
        list: "a list", dict: "an object",
    }.get(type(value), type(value).__name__)
