"""The filter, order and columns of a run's list: read from an address or a search box, written to an address."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Self
from urllib.parse import urlencode

from django.http import QueryDict
from pydantic import ValidationError

from inspector.html.inspector_tags import decimal, finding_title, kind_words, number
from rollout_inspector.diagnose.kinds import KINDS
from rollouts.store.parameters import MAX_TEXT, SortName, Text
from rollouts.store.trajectory_filters import INPUTS, PARAMETERS, TrajectoryFilters


class TrajectoryColumn(NamedTuple):
    """A column of the list of trajectories."""

    label: str
    sort: str = ""
    """The order that the first press of its head leads to; the second press reverses it. Empty = it has none."""
    words: tuple[str, str] = ("", "")  # The ascending and the descending order in words.
    is_usual: bool = True  # It is shown where nobody has chosen columns.
    is_right: bool = False  # It holds numbers.


COLUMNS = {
    "index": TrajectoryColumn("Trajectory", "index", ("run order", "run order, last first")),
    "said": TrajectoryColumn("Prompt and answer"),
    "findings": TrajectoryColumn("Findings", "-n_findings", ("fewest findings first", "most findings first")),
    "training": TrajectoryColumn("Training step", "training_step", ("first step first", "last first"), False, True),
    "group": TrajectoryColumn("Group", "group", ("by group", "by group, backwards")),
    "reward": TrajectoryColumn("Reward", "-reward", ("reward, worst first", "reward, best first"), True, True),
    "ended": TrajectoryColumn("Ended", "stop_reason", ("by stop reason", "by stop reason, backwards")),
    "rows": TrajectoryColumn("Rows", "-n_rows", ("fewest rows first", "most rows first"), True, True),
    "calls": TrajectoryColumn("Calls", "-n_steps", ("fewest calls first", "most calls first"), False, True),
    "tokens": TrajectoryColumn("Tokens", "-n_tokens", ("shortest first", "longest first"), True, True),
    "sampled": TrajectoryColumn("Sampled", "-n_sampled", ("fewest sampled first", "most sampled first"), False, True),
    "trained": TrajectoryColumn("Trained", "-n_trained", ("fewest trained first", "most trained first"), True, True),
    "damage": TrajectoryColumn("Damage", "-damage", ("least damage first", "most damage first"), False, True),
    "lost": TrajectoryColumn("Lost", "-n_lost", ("fewest lost first", "most lost first"), False, True),
}
"""The columns of the list, in order; the first one is always shown."""
USUAL = tuple(name for name, column in COLUMNS.items() if column.is_usual)
ORDERS = {
    sign + column.sort.removeprefix("-"): column.words[bool(sign)]
    for column in COLUMNS.values() if column.sort for sign in ("", "-")
}
"""Order -> its words."""
PERSONAL = tuple(field for field, asked in INPUTS.items() if asked.is_personal)  # What a visitor does not filter by.
_SIGNS: dict[str, dict[str, str]] = {}  # A word of the search box -> sign -> parameter.
for _field, _asked in INPUTS.items():
    _SIGNS.setdefault(_asked.word, {})[_asked.sign] = PARAMETERS[_field]
for _field, _asked in INPUTS.items():
    if _asked.sign == ":":
        _SIGNS.setdefault(PARAMETERS[_field], {":": PARAMETERS[_field]})
_TERM = re.compile(r'([A-Za-z_]+) *(>=|<=|[:=<>≥≤]) *("[^"]*"|\S+)|"([^"]*)"|\S+')
_SHORT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKmM])")


def read_words(text: str) -> tuple[dict[str, str], list[str]]:
    """The parameters that the text of the search box stands for, and a sentence for each part that it misses.
    ``kind:branch reward>0.5 tokens>10k`` and so on, as ``INPUTS`` has them. Other text is searched in the ids."""
    values: dict[str, str] = {}
    notices, free = [], []
    for term in _TERM.finditer(text):
        word, sign = (term[1] or "").lower(), {"≥": ">=", "≤": "<=", "=": ":"}.get(term[2], term[2])
        if word not in _SIGNS:
            free.append(term[0].strip('"'))
            if word:
                notices.append(f"“{term[1]}” is no word of the search, so “{term[0]}” is looked for in the ids.")
            continue
        parameters = _meant(_SIGNS[word], sign, term[3].strip('"'))
        values |= parameters
        if not parameters:
            notices.append(f"“{term[0]}” was left out: “{word}” takes {' or '.join(sorted(_SIGNS[word]))} and a value.")
    return values | ({"text": " ".join(free)} if free else {}), notices


def _meant(parameters: Mapping[str, str], sign: str, value: str) -> dict[str, str]:
    """The parameters of one word with its sign; empty where the two do not go together."""
    if parameters.get(":") == "finding":
        by_title = {spec.title.lower(): kind for kind, spec in KINDS.items()}
        return {"finding": by_title.get(value.lower(), value)} if sign == ":" else {}
    if parameters.get(":") == "flawed":
        return {"flawed": "1"} if sign == ":" and value.lower() in ("yes", "1") else {}
    if ":" not in parameters and (short := _SHORT.fullmatch(value)):
        value = f"{float(short[1]) * (1000 if short[2] in 'kK' else 1_000_000):.0f}"
    if sign in parameters:
        return {parameters[sign]: value}
    if sign == ":" and ">=" in parameters:
        return {parameters[">="]: value, parameters["<="]: value}
    if f"{sign}=" in parameters and value.isascii() and value.isdigit():  # of whole numbers
        return {parameters[f"{sign}="]: str(int(value) + (1 if sign == ">" else -1))}
    return {parameters[f"{sign}="]: value} if f"{sign}=" in parameters else {}


class Chip(NamedTuple):
    """A filter that is set, as the list names it."""

    words: str
    url: str  # The list without it.


class ListQuery(TrajectoryFilters):
    """The filter, order and columns of a run's list. ``notices`` names each value of its address that was left out."""

    sort: SortName = "index"
    columns: Text = ""
    """The names of the columns that are shown, with commas; empty = the usual ones."""
    after: Text = ""
    notices: tuple[str, ...] = ()

    @classmethod
    def read(cls, params: QueryDict, reader: int | None, typed: str = "") -> Self:
        """From query parameters; never raises. ``reader``: the key of the user who asks; None = a visitor, who learns
        nothing of comments. ``typed``: the text of the search box, which outdoes the parameters."""
        words, notices = read_words(typed.replace("\0", "")[:MAX_TEXT])
        values: dict[str, Any] = {}
        for name, parameter in (*PARAMETERS.items(), ("sort", "sort"), ("after", "after")):
            text = words.get(parameter, params.get(parameter, "").replace("\0", "")[:MAX_TEXT])
            if not text.strip() or (parameter, text) == ("muted", "show"):
                continue
            if name in PERSONAL and reader is None:
                notices.append(f"Only who has a role in the project filters by {parameter}; it was left out.")
                continue
            values[parameter] = True if name == "flawed" else text
        try:
            cls.model_validate(values)
        except ValidationError as error:
            for fault in error.errors():
                parameter = str(fault["loc"][0])
                notices.append(_notice(parameter, values.pop(parameter), fault["type"], fault.get("ctx", {})))
        columns = set(",".join(params.getlist("columns")[: len(COLUMNS)])[:MAX_TEXT].split(","))
        names = tuple(name for name in COLUMNS if name in columns)
        values["columns"] = ",".join(names) if names and {*names, "index"} != {*USUAL} else ""
        return cls.model_validate({**values, "reader": reader if values.get("seen") else None, "notices": notices})

    def pairs(self) -> list[tuple[str, str]]:
        """The parameters of this filter and order, without ``after`` and without defaults."""
        chosen = self.model_dump(include={*PARAMETERS, "sort", "columns"}, by_alias=True, exclude_defaults=True)
        return [(name, "1" if value is True else f"{value:.9g}" if isinstance(value, float) else str(value))
                for name, value in chosen.items()]

    def query(self, **changes: str) -> str:
        """`?...` with some parameters changed (empty = dropped); empty when nothing is filtered."""
        pairs = {name: value for name, value in {**dict(self.pairs()), **changes}.items() if value}
        return f"?{urlencode(pairs)}" if pairs else ""

    def list_query(self, **changes: str) -> str:
        """As ``query``, with the place of the list behind it."""
        return f"{self.query(**changes) or '?'}#trajectories"

    def heads(self, shown: list[str]) -> list[dict[str, Any]]:
        """The heads of these columns: their fields, ``name``, ``url``, ``order`` now (empty = another), ``words``."""
        heads = []
        for name in shown:
            column = COLUMNS[name]
            back = column.sort.removeprefix("-") if column.sort.startswith("-") else f"-{column.sort}"
            to = back if self.sort == column.sort else column.sort
            order = "descending" if self.sort.startswith("-") else "ascending"
            order = order if self.sort.lstrip("-") == column.sort.lstrip("-") else ""
            url = self.list_query(sort="" if to == "index" else to) if column.sort else ""
            words = ORDERS.get(to, "")
            heads.append({**column._asdict(), "name": name, "url": url, "order": order, "words": words})
        return heads

    def chips(self) -> list[Chip]:
        """The filters that are set, in words."""
        fields = {parameter: field for field, parameter in PARAMETERS.items()}
        return [
            Chip(_words(fields[parameter], getattr(self, fields[parameter])), self.list_query(**{parameter: ""}))
            for parameter, _ in self.pairs() if parameter in fields
        ]

    @property
    def shown(self) -> tuple[str, ...]:
        """The names of the columns that are shown where the list has values for them."""
        return ("index", *(name for name in self.columns.split(",") if name != "index")) if self.columns else USUAL

    @property
    def is_set(self) -> bool:
        """Something is filtered out."""
        return any(name not in ("sort", "columns") for name, _ in self.pairs())


def _words(field: str, value: Any) -> str:
    """`reward ≥ 0.5`, `group: g1`: a filter as a chip names it."""
    filter_input = INPUTS[field]
    if field == "kind":
        return finding_title(value)
    if field == "flawed":
        return "with a finding"
    write = {float: decimal, int: number}.get(type(value), kind_words)
    text = write(value)
    sign = {">=": "≥", "<=": "≤"}.get(filter_input.sign, filter_input.sign)
    return f"{filter_input.word}: {text}" if sign == ":" else f"{filter_input.word} {sign} {text}"


def _notice(parameter: str, text: str, fault: str, context: Mapping[str, Any]) -> str:
    """What the page says about a value that it left out."""
    if fault == "unknown_name":
        return f"There is no {parameter} “{text[:40]}”; it was left out. Known: {context['names']}."
    if fault in ("float_parsing", "finite_number"):
        return f"“{text[:40]}” is not a number, so rewards were not limited by it."
    return f"“{text[:40]}” is not a whole number, so “{parameter}” was left out."


def search_words(has_role: bool) -> list[tuple[str, str]]:
    """An example of each word of the search box, and what it does."""
    first: dict[str, tuple[str, str]] = {}
    for field, filter_input in INPUTS.items():
        if has_role or not filter_input.is_personal:
            description = TrajectoryFilters.model_fields[field].description or ""
            first.setdefault(filter_input.word, (filter_input.example, description))
    return list(first.values())
