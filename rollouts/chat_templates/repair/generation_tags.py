"""Place ``{% generation %}`` tags in a chat template, so that ``return_assistant_tokens_mask`` marks what was sampled.

The template is taken apart, every output is given a name, and the probes are rendered once to see which output writes
inside a sampled span: behind the generation prompt, up to the stop token. What writes only there is wrapped. One that
also writes other roles' messages is wrapped behind a test of the role; constant text that a span begins or ends in is
cut there. Then all of it is proved on the marked template from scratch; what is not proved is never given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, pairwise
from typing import Any

from rollouts.chat_templates.jinja_source.parts import (
    BranchGroup,
    CannotTakeApart,
    Leaf,
    Node,
    Operand,
    cut,
    explicit,
    take_apart,
    walk,
)
from rollouts.chat_templates.probes.checks import check, make_render_cache
from rollouts.chat_templates.probes.compare import common_length
from rollouts.chat_templates.probes.conversations import markers_of
from rollouts.chat_templates.probes.generation_checks import NAME, has_generation_tags
from rollouts.chat_templates.probes.property_checks import stop_text
from rollouts.chat_templates.probes.render_cache import key_of
from rollouts.chat_templates.probes.report import CheckReport, CheckStatus
from rollouts.chat_templates.repair.assistant_masks import exact_mask, merged, overlap_mask, transformers_mask
from rollouts.chat_templates.repair.regression_set import RegressionSet
from rollouts.chat_templates.repair.search import unified_diff
from rollouts.chat_templates.sandbox.render import Conversation, TemplateRenderer, TemplateTokenizer
from rollouts.tito.interfaces import RenderFailed

CUTS = 8
"""At most this many constants are cut."""
_MARKED = re.compile("\x02([0-9]+);([01]*)\x02")
_TARGET = re.compile(r"for\s+([A-Za-z_]\w*)\s+in\b")


@dataclass(frozen=True)
class GenerationTags:
    """A template with generation tags that were verified; it renders as before, byte for byte."""

    template: str
    diff: str
    """Unified diff against the original."""
    blocks: int
    """Generation blocks in the template; one message may be marked by several."""
    conversations: int
    """Conversations in which the mask was proved for every answer: each goes on as it was prompted."""
    partly: int
    """Further ones with an answer that was rewritten: it was looked for behind what is left of its header, and what
    follows a place that cannot be told was not judged."""
    renders: int
    """Renders that stay byte for byte the same."""
    by_tokens: bool
    """False = compared by characters alone, without a tokenizer."""

    def to_dict(self) -> dict[str, Any]:
        """The marks as JSON."""
        return {
            "diff": self.diff,
            "template": self.template,
            "verified": True,
            "blocks": self.blocks,
            "conversations": self.conversations,
            "partly": self.partly,
            "renders": self.renders,
            "by_tokens": self.by_tokens,
        }


class CannotMark(Exception):
    """There is no place for the tags; the message says why."""


@dataclass
class _Spans:
    """What was sampled in one render: ``[start, stop)`` characters, and how far that can be told."""

    sampled: list[tuple[int, int]] = field(default_factory=list)
    limit: int = 0
    is_told: bool = False
    """A message of it goes on as it was prompted, so that what was sampled is no guess."""
    is_proved: bool = True
    """Every message goes on as it was prompted, and is kept by what follows it."""


def find_marks(tokenizer: TemplateTokenizer | None, report: CheckReport) -> tuple[GenerationTags | None, str]:
    """Verified generation tags for the template of a report, or None and the reason."""
    original = report.chat_template
    if has_generation_tags(original) and report.check(NAME).status is CheckStatus.OK:
        return None, "The template has generation tags of its own, and they mark exactly what is sampled."
    cache, _ = make_render_cache(TemplateRenderer(tokenizer, original), report.tools, report.kwargs)
    try:
        stop = cache.answer([stop_text])[0]
        regressions = RegressionSet(cache)
        spans = _all_spans(regressions, stop)
        nodes, state = _learn(regressions, original, spans)
        for sets_inside in (True, False):
            template = _Writer(state, sets_inside).write(nodes)
            marks = _verified(tokenizer, report, regressions, spans, template)
            if marks is not None:
                return marks, ""
        raise CannotMark("tags at the places that were found change the render, or mark something else")
    except (CannotMark, CannotTakeApart, RenderFailed) as error:
        return None, f"No place for generation tags was found: {error}."


def with_marks(tokenizer: TemplateTokenizer | None, report: CheckReport) -> CheckReport:
    """The same report with verified generation tags, or with the sentence that says why there are none."""
    found, detail = find_marks(tokenizer, report)
    return replace(report, marks=found, marks_detail=detail)


def _all_spans(regressions: RegressionSet, stop: str | None) -> dict[str, _Spans]:
    """For each conversation with an assistant message, by key, what was sampled in it."""
    found = {}
    for key, conversation in regressions.conversations.items():
        roles = [message["role"] for message in conversation.messages]
        if "assistant" in roles and regressions.original[key] is not None:
            found[key] = _spans(regressions, conversation, stop)
    if not any(spans.sampled and spans.is_told for spans in found.values()):
        raise CannotMark(
            "what the model is prompted with is in no probe how the history goes on, so that nothing tells what of the "
            "render was sampled"
        )
    return found


def _spans(regressions: RegressionSet, conversation: Conversation, stop: str | None) -> _Spans:
    messages, whole = conversation.messages, regressions.original[key_of(conversation)] or ""
    spans, position = _Spans(), 0
    for k, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, prompt, history = (
            regressions.original[key_of(conversation._replace(messages=messages[:n], add_generation_prompt=prompted))]
            if n
            else ""
            for n, prompted in ((k, False), (k, True), (k + 1, False))
        )
        if before is None or prompt is None or history is None:
            spans.limit, spans.is_proved = position, False
            return spans
        spans.is_proved &= whole.startswith(prompt) and whole.startswith(history)
        if whole.startswith(prompt):
            begin, spans.is_told = len(prompt), True
        else:
            begin = _behind_header(whole, position, prompt[common_length(before, prompt) :], markers_of([message]))
        end = whole.find(stop, begin) + len(stop) if stop and stop in whole[max(begin, 0) :] else -1
        if whole.startswith(history):
            last = history.rfind(stop, max(begin, 0)) if stop else -1
            end = last + len(stop) if stop and last >= 0 else len(history)
        if begin < 0 or end < begin:
            spans.limit, spans.is_proved = position, False
            return spans
        if end > begin:
            spans.sampled.append((begin, end))
        position = end
    spans.limit = len(whole)
    return spans


def _behind_header(whole: str, position: int, header: str, markers: Sequence[str]) -> int:
    """Where an earlier message begins in a render that no longer goes on as it was prompted; -1 where none is seen.

    Behind the generation prompt, or its first lines where the history drops what stands behind them.
    """
    lines = header.splitlines(keepends=True)
    for n in range(len(lines), 0, -1):
        shown = "".join(lines[:n])
        place = whole.find(shown, position)
        # One that stands behind the message's own words is another message's.
        if place >= 0 and not any(marker in whole[position:place] for marker in markers):
            return place + len(shown)
    return -1


IN, OUT, NONE, BLANK = "in", "out", "none", "blank"
"""What an operand writes: sampled text, other text, never anything; white space that is never written. Any other
state is the condition under which it writes sampled text."""


@dataclass
class _Seen:
    """What an operand was seen to write: the answers of its tests, where it wrote inside spans and where outside."""

    tests: list[str] = field(default_factory=list)
    inside: set[str] = field(default_factory=set)
    outside: set[str] = field(default_factory=set)

    def state(self) -> str | None:
        """One of the states; None when no test tells inside and outside apart."""
        if not self.outside:
            return IN if self.inside else NONE
        if not self.inside:
            return OUT
        if self.inside & self.outside:
            return None
        return next((test for test, answers in self._conditions() if self._parts(answers)), None)

    def fits(self, condition: str) -> bool:
        """Does the condition hold wherever it wrote inside, and nowhere else?"""
        return any(test == condition and self._parts(answers) for test, answers in self._conditions())

    def _parts(self, answers: Callable[[str], bool]) -> bool:
        return all(map(answers, self.inside)) and not any(map(answers, self.outside))

    def _conditions(self) -> Iterator[tuple[str, Callable[[str], bool]]]:
        """Single tests and their negations, then two of them joined."""
        tests = enumerate(self.tests)
        single = [part for n, test in tests for part in ((test, n, "1"), (f"not ({test})", n, "0"))]
        for test, n, yes in single:
            yield test, partial(_all_are, ((n, yes),))
        for (one, n, yes), (other, m, too) in combinations(single, 2):
            yield f"{one} and {other}", partial(_all_are, ((n, yes), (m, too)))
            yield f"{one} or {other}", partial(_any_is, ((n, yes), (m, too)))


def _all_are(wanted: Sequence[tuple[int, str]], answers: str) -> bool:
    return all(answers[n] == value for n, value in wanted)


def _any_is(wanted: Sequence[tuple[int, str]], answers: str) -> bool:
    return any(answers[n] == value for n, value in wanted)


def _learn(regressions: RegressionSet, template: str, spans: Mapping[str, _Spans]) -> tuple[list[Node], dict[int, str]]:
    """The template taken apart and cut where spans begin and end, and the state of each operand.

    Raises :class:`CannotMark`.
    """
    nodes = take_apart(template)
    switches = _switches(nodes)
    for _ in range(CUTS):
        seen, cuts = _occurrences(regressions, nodes, spans, switches)
        leaves = {operand.name: leaf for leaf in walk(nodes) for operand in leaf.operands}
        if not cuts:
            return nodes, _states(nodes, seen)
        name, offset = min(cuts)
        leaf = leaves[name]
        place = next(n for n, operand in enumerate(leaf.operands) if operand.name == name)
        if leaf.operands[place].text is None:
            raise CannotMark(
                f"{_where(leaf, leaf.operands[place])} writes what is sampled and what is not in one piece"
            )
        leaf.operands[place : place + 1] = cut(leaf.operands[place], offset)
        leaf.is_cut = True
        for n, one in enumerate(one for leaf in walk(nodes) for one in leaf.operands):
            one.name = n
    raise CannotMark("what is sampled begins and ends at too many places")


def _states(nodes: Sequence[Node], seen: Mapping[int, _Seen]) -> dict[int, str]:
    found: dict[int, str] = {}
    for leaf in walk(nodes):
        for operand in leaf.operands:
            state = seen[operand.name].state() if operand.name in seen else NONE
            if state is None:
                where = _where(leaf, operand)
                raise CannotMark(f"{where} writes what is sampled and what is not, and no simple test tells which")
            found[operand.name] = state
        # What only ever writes sampled text goes under the condition of its neighbour where that holds.
        for one, other in [*pairwise(leaf.operands), *pairwise(reversed(leaf.operands))]:
            condition = found[one.name]
            if condition not in (IN, OUT, NONE) and found[other.name] == IN and seen[other.name].fits(condition):
                found[other.name] = condition
    return found


def _where(leaf: Leaf, operand: Operand) -> str:
    shown = operand.source if len(operand.source) <= 60 else f"{operand.source[:59]}…"
    return f"the output of {shown}" + (f" on line {leaf.line}" if leaf.line else "")


def _switches(nodes: Sequence[Node]) -> list[str]:
    """The conditions that decide what the generation prompt is: of the branches inside its own."""
    found: list[str] = []
    for node in nodes:
        if isinstance(node, BranchGroup):
            for section in node.sections:
                if "add_generation_prompt" in section.head.body:
                    heads = [leaf.body for leaf in walk(section.children) if leaf.kind in ("if", "elif")]
                    found += [head.partition(" ")[2].strip() for head in heads]
                else:
                    found += _switches(section.children)
    return [test for test in dict.fromkeys(found) if not re.search(r"\b(?:loop|messages?|m)\b", test)]


def _tests(loops: Sequence[str], switches: Sequence[str]) -> list[str]:
    """What an operand inside these loops is asked about, wherever it writes."""
    targets = [match.group(1) for match in map(_TARGET.match, loops) if match]
    if not targets:
        return list(switches)
    message = targets[0]
    inner = ["loop.first", f"{message}['content']"] if len(loops) > 1 else []
    return [f"{message}['role'] == 'assistant'", *switches, *inner]


def _occurrences(
    regressions: RegressionSet, nodes: Sequence[Node], spans: Mapping[str, _Spans], switches: Sequence[str]
) -> tuple[dict[int, _Seen], set[tuple[int, int]]]:
    """What each operand was seen to write, and (operand, offset) where one crosses the bound of a span."""
    seen: dict[int, _Seen] = {}

    def mark(operand: Operand, loops: Sequence[str]) -> str:
        tests = _tests(loops, switches)
        seen[operand.name] = _Seen(tests)
        answers = "".join(f"{{{{- '1' if {test} else '0' -}}}}" for test in tests)
        return f'{{{{- "\x02{operand.name};" -}}}}{answers}{{{{- "\x02" -}}}}'

    keys = list(spans)
    named = TemplateRenderer(regressions.cache.renderer.tokenizer, explicit(nodes, mark))
    outcomes = named.render_many([regressions.conversations[key] for key in keys])
    cuts: set[tuple[int, int]] = set()
    for key, outcome in zip(keys, outcomes, strict=True):
        if _MARKED.sub("", outcome.text) != regressions.original[key]:
            raise CannotMark("the template looks at what it has written, so that its parts cannot be told apart")
        start = 0
        _, *rest = _MARKED.split(outcome.text)
        for name, answers, text in zip(map(int, rest[::3]), rest[1::3], rest[2::3], strict=True):
            stop = start + len(text)
            if text and stop <= spans[key].limit:
                bounds = {edge for span in spans[key].sampled for edge in span if start < edge < stop}
                cuts.update((name, edge - start) for edge in bounds)
                if not bounds:
                    within = any(begin <= start and stop <= end for begin, end in spans[key].sampled)
                    (seen[name].inside if within else seen[name].outside).add(answers)
            start = stop
    return seen, cuts


@dataclass
class _Unit:
    """A stretch of template source, what it writes, and the white space control at its two ends."""

    source: str
    state: str
    strips_before: bool = False
    closing: str = "}}"


class _Writer:
    """Puts a template together again, tags around what writes sampled text."""

    def __init__(self, state: Mapping[int, str], sets_inside: bool) -> None:
        self.state = state
        self.sets_inside = sets_inside
        """False: no assignment stands inside the tags, whose scope it would not leave."""

    def write(self, nodes: Sequence[Node]) -> str:
        units = [unit for node in nodes for unit in self._units(node)]
        written, n = [], 0
        while n < len(units):
            stop = self._run(units, n)
            written.append(_wrapped(units[n:stop], units[stop:]) if stop > n else units[n].source)
            n = max(stop, n + 1)
        return "".join(written)

    @staticmethod
    def _run(units: Sequence[_Unit], start: int) -> int:
        """Where the units that are wrapped together from ``start`` on end."""
        state, stop = units[start].state, start
        if state in (OUT, NONE, BLANK):
            return start
        for n in range(start, len(units)):
            if units[n].state == state:
                stop = n + 1
            elif units[n].state not in (NONE, BLANK):
                break
        return stop

    def _units(self, node: Node) -> list[_Unit]:
        if isinstance(node, BranchGroup):
            return [self._group(node)]
        if node.kind not in ("output", "data"):
            free = node.kind in ("comment", "opaque") or (node.kind == "set" and self.sets_inside)
            return [_Unit(node.source, NONE if free else OUT)]
        states = [self.state[operand.name] for operand in node.operands]
        if node.kind == "data":
            return _texts(node, states)
        written = set(states) - {NONE}
        if node.is_cut or len(written) > 1:
            return _outputs(node, states)
        return [_Unit(node.source, written.pop() if written else NONE, node.opening.endswith("-"), node.closing)]

    def _group(self, group: BranchGroup) -> _Unit:
        leaves = [leaf for section in group.sections for leaf in walk(section.children)]
        states = {self.state[operand.name] for leaf in leaves for operand in leaf.operands} - {NONE}
        kinds = {leaf.kind for leaf in leaves}
        barred = kinds & {"break", "continue"} or ("set" in kinds and not self.sets_inside)
        first, last = group.sections[0].head, group.tail or group.sections[0].head
        uniform = states.pop() if len(states) == 1 else OUT if states else NONE
        if uniform in (IN, NONE) and not barred and not any(leaf.is_cut for leaf in leaves):
            source = "".join(leaf.source for leaf in walk([group]))
            return _Unit(source, uniform, first.opening.endswith("-"), last.closing)
        sections = "".join(section.head.source + self.write(section.children) for section in group.sections)
        return _Unit(sections + last.source, OUT)


def _stretches(leaf: Leaf, states: Sequence[str]) -> list[tuple[str, list[Operand]]]:
    """Neighbouring operands that are wrapped alike."""
    found: list[tuple[str, list[Operand]]] = []
    for state, operand in zip(states, leaf.operands, strict=True):
        if found and state in (found[-1][0], NONE):
            found[-1][1].append(operand)
        else:
            found.append((state, [operand]))
    return found


def _texts(leaf: Leaf, states: Sequence[str]) -> list[_Unit]:
    """Constant text; white space around it that is never written stays outside of the tags."""
    text = "".join(operand.source for operand in leaf.operands)
    if not text:
        return [_Unit(leaf.source, BLANK, closing="")]
    before, _, after = leaf.source.partition(text)
    pieces = [
        _Unit("".join(operand.source for operand in operands), state, closing="")
        for state, operands in _stretches(leaf, states)
    ]
    around = [[_Unit(space, BLANK, closing="")] if space else [] for space in (before, after)]
    return [*around[0], *pieces, *around[1]]


def _outputs(leaf: Leaf, states: Sequence[str]) -> list[_Unit]:
    """An output as several, one for each stretch of operands that are wrapped alike."""
    units = []
    stretches = _stretches(leaf, states)
    for n, (state, operands) in enumerate(stretches):
        opening = leaf.opening if n == 0 else "{{"
        closing = leaf.closing if n == len(stretches) - 1 else "}}"
        body = operands[0].source + "".join(f" {one.joiner} {one.source}" for one in operands[1:])
        units.append(_Unit(f"{opening} {body} {closing}", state, opening.endswith("-"), closing))
    return units


def _wrapped(run: Sequence[_Unit], rest: Sequence[_Unit]) -> str:
    source = "".join(unit.source for unit in run)
    opening = "{%-" if run[0].strips_before else "{%"
    closing = "%}"
    if run[-1].closing.startswith("-"):
        closing = "-%}"
    elif not run[-1].closing.endswith("%}") and rest and rest[0].state != BLANK:
        # A line break after an output stays, after a block it would go.
        closing = "+%}" if rest[0].source.startswith("\n") else closing
    state = run[0].state
    if state == IN:
        return f"{opening} generation %}}{source}{{% endgeneration {closing}"
    test = f"{opening} if {state} %}}"
    return f"{test}{{% generation %}}{source}{{% endgeneration %}}{{% else %}}{source}{{% endif {closing}"


def _verified(
    tokenizer: TemplateTokenizer | None,
    report: CheckReport,
    regressions: RegressionSet,
    spans: Mapping[str, _Spans],
    template: str,
) -> GenerationTags | None:
    """The marks, if every render is what it was and every mask is what was sampled."""
    if not has_generation_tags(template):
        return None
    keys = list(regressions.conversations)
    outcomes = TemplateRenderer(tokenizer, template).render_many([regressions.conversations[key] for key in keys])
    judged: list[_Spans] = []
    for key, outcome in zip(keys, outcomes, strict=True):
        if regressions.original[key] is None:
            continue
        if outcome.text != regressions.original[key] or not outcome.ok:
            return None
        known = spans.get(key, _Spans(limit=len(outcome.text)))
        marked = [span for span in merged(outcome.tracked_spans) if span[1] <= known.limit]
        if marked != known.sampled or not _tokens_agree(tokenizer, outcome.text, outcome.tracked_spans, known):
            return None
        if known.sampled and known.is_told:
            judged.append(known)
    now = check(tokenizer, template, report.tools, report.kwargs)
    if now.check(NAME).status is not CheckStatus.OK:
        return None
    blocks = template.count("endgeneration")
    proved = sum(spans.is_proved for spans in judged)
    renders = sum(text is not None for text in regressions.original.values())
    diff = unified_diff(report.chat_template, template)
    by_tokens = hasattr(tokenizer, "encode_offsets")
    return GenerationTags(template, diff, blocks, proved, len(judged) - proved, renders, by_tokens)


def _tokens_agree(
    tokenizer: TemplateTokenizer | None, text: str, tracked: Sequence[tuple[int, int]], known: _Spans
) -> bool:
    """Does ``transformers`` mark every token that lies in what was sampled, and none that lies outside of it?"""
    codec: Any = tokenizer
    if not hasattr(codec, "encode_offsets") or known.limit < len(text):
        return True
    mask = transformers_mask(codec, text, tracked)
    wholly, partly = exact_mask(codec, text, known.sampled), overlap_mask(codec, text, known.sampled)
    return bool((wholly <= mask).all() and (mask <= partly).all())
