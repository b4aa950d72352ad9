"""What a test can hold of the words of the house; docs/glossary.md has the rest."""

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.conftest import ROOT
from tests.samples.product import modules, package_of

RETIRED = {
    "scribe", "pulse", "pile", "piles", "desk", "ahead", "talk", "given", "world", "own", "forest", "bench", "facts",
    "sides", "spelt", "anew", "judge", "judged", "judges",
}
"""Words of a private dialect, and *judge*, which in this field is a model that returns a reward."""

PRONOUNS = {
    "one", "found", "held", "said", "known", "asked", "kept", "wanted", "named", "made", "shown", "left", "told",
    "given", "taken", "rest", "meant", "seen", "drawn", "begun", "got", "put",
}
"""Words that stand for a noun and name none: a variable is called by what it holds."""

CEILINGS: dict[str, int] = {
    "inspector.api": 2,
    "inspector.chat_templates": 1,
    "inspector.runs": 3,
    "inspector.team": 3,
    "inspector.trajectories": 10,
    "inspector.web": 3,
    "rollout_inspector.client": 2,
    "rollout_inspector.diagnose": 1,
    "rollout_inspector.guard": 2,
    "rollouts.jobs": 1,
    "rollouts.store": 3,
}
"""Room -> how many assignments still go to such a word. It only falls: ``python -m tests.test_names`` prints it."""

DJANGO = {"Command"}
"""Class names that Django looks for."""

DIALECT = re.compile(r"\b(gives|anew|spelt|judg\w+|scribe|pulse|piles?|desk)\b", re.IGNORECASE)
"""Words that docstrings do without: *Returns* says what *gives* said, *again* what *anew* said."""
LIMIT = re.compile(r"(^|_)MOST(_|$)|_LIMIT$|_SHOWN$|(^|_)(LONGEST|LARGEST)(_|$)")
UNIT = re.compile(r"_S$|_SECS?$|_MS$")


def words(name: str) -> set[str]:
    """The words of a name in snake case or camel case, in small letters."""
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))


def definitions(source: str) -> Iterator[tuple[str, str, int]]:
    """(kind, name, line) of each class, function and module constant; kind is class, function or constant."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield "class", node.name, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield "function", node.name, node.lineno
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        yield from (("constant", one.id, node.lineno) for one in targets if isinstance(one, ast.Name))


def retired(module: str, source: str) -> list[str]:
    """Names of a module that hold a retired word, its own name included."""
    found = [f"{module}: the module's name" for part in module.split(".") if words(part) & RETIRED]
    return found + [
        f"{module}:{line} {name}"
        for kind, name, line in definitions(source)
        if kind != "constant" and words(name) & RETIRED
    ]


def odd_constants(module: str, source: str) -> list[str]:
    """Limits that are not called ``MAX_*`` and durations that do not end in ``_SECONDS``."""
    return [
        f"{module}:{line} {name}"
        for kind, name, line in definitions(source)
        if kind == "constant" and name.isupper() and (LIMIT.search(name) or UNIT.search(name))
    ]


def sentences(source: str) -> Iterator[tuple[int, str]]:
    """(line, sentence) of every docstring and comment of a module; code in double backticks is one word."""
    for line, text in texts(source):
        for part in re.split(r"\n\s*\n|\n\s*[*-] ", re.sub(r"``[^`]*``", "X", text)):
            for sentence in re.split(r"(?<=[.;:!?])\s+(?=[A-Z`(])", part.strip().replace("\n", " ")):
                yield line, sentence


def texts(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring of a module, and of every line that has a comment."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(text := getattr(statement.value, "value", None), str):
                yield statement.lineno, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def hard_sentences(module: str, source: str) -> list[str]:
    """Sentences of more than 30 words, and sentences with a word of the private dialect."""
    return [
        f"{module}:{line} {sentence}"
        for line, sentence in sentences(source)
        if len(sentence.split()) > 30 or DIALECT.search(sentence)
    ]


def pronouns() -> Counter[str]:
    """Room -> the assignments that store into one of :data:`PRONOUNS`; rooms without any are left out."""
    counts: Counter[str] = Counter()
    for module, source in modules().items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in PRONOUNS:
                counts[package_of(module)] += 1
    return counts


def test_variables_are_named_by_nouns() -> None:
    """A room with more is a step back. A room with fewer lowers its ceiling, so that it only falls."""
    assert dict(pronouns()) == CEILINGS


def test_docstrings_are_plain() -> None:
    assert [found for module, source in modules().items() for found in hard_sentences(module, source)] == []


def test_a_hard_sentence_would_be_found() -> None:
    assert hard_sentences("a.b", 'def f():\n    """The run, judged anew."""')
    assert hard_sentences("a.b", "runs = 3  # They are judged anew.")
    assert hard_sentences("a.b", '"""' + "word " * 31 + '"""')
    assert not hard_sentences("a.b", '"""' + "word " * 20 + "end. " + "Word " * 20 + '"""')


def test_no_retired_word() -> None:
    assert [name for module, source in modules().items() for name in retired(module, source)] == []


def test_limits_and_durations_are_named_alike() -> None:
    assert [name for module, source in modules().items() for name in odd_constants(module, source)] == []


def test_a_class_name_occurs_once() -> None:
    places = defaultdict(list)
    for module, source in modules().items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name not in DJANGO and not node.name.startswith("_"):
                places[node.name].append(module)
    assert {name: held for name, held in places.items() if len(held) > 1} == {}


def test_a_wrong_name_would_be_found() -> None:
    assert retired("rollouts.worker.scribe", "") and retired("a.b", "class OwnSpan: pass")
    assert retired("a.b", "class A:\n    def judge_run(self): pass") and not retired("a.b", "def known(): pass")
    assert odd_constants("a.b", "ROW_MOST = 3") and odd_constants("a.b", "WAIT_S: float = 1.0")
    assert not odd_constants("a.b", "MAX_ROWS = 3\nWAIT_SECONDS = 1.0\nROWS_S_MAX = 1")


def test_the_glossary_has_at_most_forty_terms() -> None:
    rows = [
        line
        for line in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    ]
    terms = [line.split("|")[1].strip() for line in rows[1:]]
    assert terms == sorted(terms, key=str.lower) and len(set(terms)) == len(terms) <= 40


if __name__ == "__main__":
    print("\n".join(f'    "{room}": {n},' for room, n in sorted(pronouns().items())))
