"""Checks of foreign JSON values, each with a sentence that names the field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
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
    """Token ids: whole numbers from 0 to 2147483647. ``5.0`` is one, because data frames write so.

    An array was checked before (``rollout_inspector.formats.readers.prompts``).
    """
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
    """Numbers as float32; null becomes NaN (writers put it in place of what JSON cannot hold).

    An array was checked before (``rollout_inspector.formats.readers.prompts``).
    """
    if isinstance(value, np.ndarray):
        return value
    items = sequence(value, where)
    types = set(map(type, items))
    if types <= _NUMBERS:
        array = _float_array(items, where)
    elif types <= {int, float, type(None)}:
        array = _float_array([math.nan if item is None else item for item in items], where)
    else:
        place = next(n for n, item in enumerate(items) if type(item) not in (int, float, type(None)))
        raise BadLine(f"{where} must hold numbers; element {place} is {_name(items[place])}.")
    return array


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


def text(value: Any, where: str, limit: int) -> str:
    """A short text without control characters that a database column can hold; null and missing count as empty."""
    if value is None:
        return ""
    if _is_whole(value):
        value = int(value)
        value = str(value) if abs(value) < 10**30 else "x" * (limit + 1)
    if not isinstance(value, str):
        raise BadLine(f"{where} must be a text, not {_name(value)}.")
    if len(value) > limit:
        raise BadLine(f"{where} is longer than {limit} characters.")
    if "\0" in value:
        raise BadLine(f"{where} holds the character U+0000.")
    return value


def optional_string(value: Any, where: str) -> str | None:
    """A text of any length, or None."""
    if value is not None and not isinstance(value, str):
        raise BadLine(f"{where} must be a text, not {_name(value)}.")
    return value


def number(value: Any, where: str) -> float | None:
    """A number of at most ``MAX_NUMBER``, or None. Raises :class:`BadLine`."""
    if value is None:
        return None
    if isinstance(value, bool):
        return float(value)
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
    """Further fields of a batch of ``n``: a function from an index to the fields of that element.

    Each element gets its own of a list of ``n``, and any other value whole. Empty ones are left out.
    """
    fields = rest(value, known)
    lists = {key for key, item in fields.items() if isinstance(item, list) and len(item) == n}
    limits.current().check_repeated(rest(fields, lists), n, "trajectories")

    def of(i: int) -> dict[str, Any]:
        fields_of_element = {key: item[i] if key in lists else item for key, item in fields.items()}
        return {key: field for key, field in fields_of_element.items() if field not in (None, {}, [])}

    return of


def _name(value: Any) -> str:
    return {
        type(None): "null", bool: "true or false", int: "a number", float: "a number with a fraction", str: "a text",
        list: "a list", dict: "an object",
    }.get(type(value), type(value).__name__)
