"""Which outputs of a chat template write sampled text, learned from one render of every probe."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations, pairwise

from rollout_inspector.text.chat_templates.jinja_source.parts import (
    BranchGroup, Leaf, Node, Operand, cut, explicit, take_apart, walk
)
from rollout_inspector.text.chat_templates.repair.regression_set import RegressionSet
from rollout_inspector.text.chat_templates.repair.sampled_spans import CannotMark, SampledSpans
from rollout_inspector.text.chat_templates.sandbox.render import TemplateRenderer

CUTS = 8  # At most this many constants are cut.
_MARKED = re.compile("\x02([0-9]+);([01]*)\x02")
_TARGET = re.compile(r"for\s+([A-Za-z_]\w*)\s+in\b")

IN, OUT, NONE, BLANK = "in", "out", "none", "blank"
"""The state of an operand: it writes sampled text, other text or nothing, or is white space that is never written.
Any other state is the condition under which the operand writes sampled text."""


@dataclass
class OperandUse:
    """The answers that an operand's tests gave, where it wrote inside of sampled spans and where outside. Answers are a
    string of ``0`` and ``1``, one for each test."""

    tests: list[str] = field(default_factory=list)
    inside: set[str] = field(default_factory=set)
    outside: set[str] = field(default_factory=set)

    def state(self) -> str | None:
        """One of the states; None when no test tells inside and outside apart."""
        if not self.outside:
            return IN if self.inside else NONE
        return next(self._fitting(), None) if self.inside else OUT

    def fits(self, condition: str) -> bool:
        """Does the condition hold wherever the operand wrote inside, and nowhere else?"""
        return condition in self._fitting()

    def _fitting(self) -> Iterator[str]:
        """Conditions that hold inside and not outside: a test or its negation, then two of these joined."""
        single = [
            (test, {answers for answers in self.inside | self.outside if answers[n] == yes})
            for n, name in enumerate(self.tests)
            for test, yes in ((name, "1"), (f"not ({name})", "0"))
        ]
        joined = (
            pair
            for (span, here), (other, there) in combinations(single, 2)
            for pair in ((f"{span} and {other}", here & there), (f"{span} or {other}", here | there))
        )
        return (
            test for test, holding in chain(single, joined) if holding == self.inside and not holding & self.outside
        )


def learn_places(
    regressions: RegressionSet, template: str, spans: Mapping[str, SampledSpans]
) -> tuple[list[Node], dict[int, str]]:
    """The template taken apart and cut where spans begin and end, and the state of each operand. Raises
    :class:`CannotMark`."""
    nodes = take_apart(template)
    switches = _switches(nodes)
    for _ in range(CUTS):
        uses, cuts = _occurrences(regressions, nodes, spans, switches)
        leaves = {operand.name: leaf for leaf in walk(nodes) for operand in leaf.operands}
        if not cuts:
            return nodes, _states(nodes, uses)
        name, offset = min(cuts)
        leaf = leaves[name]
        place = next(n for n, operand in enumerate(leaf.operands) if operand.name == name)
        if leaf.operands[place].text is None:
            raise CannotMark(
                f"{_where(leaf, leaf.operands[place])} writes what is sampled and what is not in one piece"
            )
        leaf.operands[place : place + 1] = cut(leaf.operands[place], offset)
        leaf.is_cut = True
        for n, leaf_operand in enumerate(leaf_operand for leaf in walk(nodes) for leaf_operand in leaf.operands):
            leaf_operand.name = n
    raise CannotMark("what is sampled begins and ends at too many places")


def _states(nodes: Sequence[Node], seen: Mapping[int, OperandUse]) -> dict[int, str]:
    states: dict[int, str] = {}
    for leaf in walk(nodes):
        for operand in leaf.operands:
            state = seen[operand.name].state() if operand.name in seen else NONE
            if state is None:
                where = _where(leaf, operand)
                raise CannotMark(f"{where} writes what is sampled and what is not, and no simple test tells which")
            states[operand.name] = state
        # An operand that writes only sampled text takes the condition of its neighbour if that condition holds for it.
        for neighbour, other in [*pairwise(leaf.operands), *pairwise(reversed(leaf.operands))]:
            condition = states[neighbour.name]
            if condition not in (IN, OUT, NONE) and states[other.name] == IN and seen[other.name].fits(condition):
                states[other.name] = condition
    return states


def _where(leaf: Leaf, operand: Operand) -> str:
    source = operand.source if len(operand.source) <= 60 else f"{operand.source[:59]}…"
    return f"the output of {source}" + (f" on line {leaf.line}" if leaf.line else "")


def _switches(nodes: Sequence[Node]) -> list[str]:
    """The conditions inside of the generation prompt's own branch: they decide which prompt is written."""
    conditions: list[str] = []
    for node in nodes:
        if isinstance(node, BranchGroup):
            for head, children in node.sections:
                if "add_generation_prompt" in head.body:
                    tests = [leaf.body for leaf in walk(children) if leaf.kind in ("if", "elif")]
                    conditions += [test.partition(" ")[2].strip() for test in tests]
                else:
                    conditions += _switches(children)
    return [test for test in dict.fromkeys(conditions) if not re.search(r"\b(?:loop|messages?|m)\b", test)]


def _tests(loops: Sequence[str], switches: Sequence[str]) -> list[str]:
    """The tests of an operand inside these loops: expressions that are evaluated wherever it writes."""
    targets = [match.group(1) for match in map(_TARGET.match, loops) if match]
    if not targets:
        return list(switches)
    message = targets[0]
    follows = "loop.previtem is defined and loop.previtem['role'] == 'assistant'"  # its header is the stop token
    inner = ["loop.first", f"{message}['content']"] if len(loops) > 1 else [follows]
    return [f"{message}['role'] == 'assistant'", *switches, *inner]


def _occurrences(
    regressions: RegressionSet, nodes: Sequence[Node], spans: Mapping[str, SampledSpans], switches: Sequence[str]
) -> tuple[dict[int, OperandUse], set[tuple[int, int]]]:
    """What each operand wrote, and (operand, offset) for each operand that crosses the bound of a span."""
    uses: dict[int, OperandUse] = {}

    def mark(operand: Operand, loops: Sequence[str]) -> str:
        tests = _tests(loops, switches)
        uses[operand.name] = OperandUse(tests)
        answers = "".join(f"{{{{- '1' if {test} else '0' -}}}}" for test in tests)
        return f'{{{{- "\x02{operand.name};" -}}}}{answers}{{{{- "\x02" -}}}}'

    keys = list(spans)
    renderer = TemplateRenderer(regressions.cache.renderer.tokenizer, explicit(nodes, mark))
    outcomes = renderer.render_many([regressions.conversations[key] for key in keys])
    cuts: set[tuple[int, int]] = set()
    for key, outcome in zip(keys, outcomes, strict=True):
        if _MARKED.sub("", outcome.text) != regressions.original[key]:
            raise CannotMark("the template looks at what it has written, so that its parts cannot be told apart")
        start = 0
        _, *pieces = _MARKED.split(outcome.text)
        for name, answers, text in zip(map(int, pieces[::3]), pieces[1::3], pieces[2::3], strict=True):
            stop = start + len(text)
            if text and stop <= spans[key].limit:
                bounds = {edge for span in spans[key].sampled for edge in span if start < edge < stop}
                cuts.update((name, edge - start) for edge in bounds)
                if not bounds:
                    within = any(begin <= start and stop <= end for begin, end in spans[key].sampled)
                    (uses[name].inside if within else uses[name].outside).add(answers)
            start = stop
    return uses, cuts
