"""Puts a template together again, with generation tags around what writes sampled text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollout_inspector.text.chat_templates.jinja_source.parts import BranchGroup, Leaf, Node, Operand, walk
from rollout_inspector.text.chat_templates.repair.tag_places import BLANK, IN, NONE, OUT


@dataclass
class _Unit:
    """A part of the template source with one state, and the white space control at its two ends."""

    source: str
    state: str
    strips_before: bool = False
    closing: str = "}}"


class TagWriter:
    """Puts a template together again, tags around what writes sampled text."""

    def __init__(self, state: Mapping[int, str], sets_inside: bool) -> None:
        self.state = state
        self.sets_inside = sets_inside
        """Whether assignments may stand inside the tags. Their values do not leave the scope of the tags."""

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
        """Where the run of units ends that begins at ``start`` and is wrapped together."""
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
        leaves = [leaf for _, children in group.sections for leaf in walk(children)]
        states = {self.state[operand.name] for leaf in leaves for operand in leaf.operands} - {NONE}
        kinds = {leaf.kind for leaf in leaves}
        barred = kinds & {"break", "continue"} or ("set" in kinds and not self.sets_inside)
        first, last = group.sections[0][0], group.tail or group.sections[0][0]
        uniform = states.pop() if len(states) == 1 else OUT if states else NONE
        if uniform in (IN, NONE) and not barred and not any(leaf.is_cut for leaf in leaves):
            source = "".join(leaf.source for leaf in walk([group]))
            return _Unit(source, uniform, first.opening.endswith("-"), last.closing)
        sections = "".join(head.source + self.write(children) for head, children in group.sections)
        return _Unit(sections + last.source, OUT)


def _stretches(leaf: Leaf, states: Sequence[str]) -> list[tuple[str, list[Operand]]]:
    """Neighbouring operands that are wrapped alike."""
    stretches: list[tuple[str, list[Operand]]] = []
    for state, operand in zip(states, leaf.operands, strict=True):
        if stretches and state in (stretches[-1][0], NONE):
            stretches[-1][1].append(operand)
        else:
            stretches.append((state, [operand]))
    return stretches


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
        body = operands[0].source + "".join(f" {operand.joiner} {operand.source}" for operand in operands[1:])
        units.append(_Unit(f"{opening} {body} {closing}", state, opening.endswith("-"), closing))
    return units


def _wrapped(run: Sequence[_Unit], rest: Sequence[_Unit]) -> str:
    source = "".join(unit.source for unit in run)
    opening = "{%-" if run[0].strips_before else "{%"
    closing = "%}"
    if run[-1].closing.startswith("-"):
        closing = "-%}"
    elif not run[-1].closing.endswith("%}") and rest and rest[0].state != BLANK:
        # A line break after an output stays. After a block it would be removed.
        closing = "+%}" if rest[0].source.startswith("\n") else closing
    state = run[0].state
    if state == IN:
        return f"{opening} generation %}}{source}{{% endgeneration {closing}"
    test = f"{opening} if {state} %}}"
    return f"{test}{{% generation %}}{source}{{% endgeneration %}}{{% else %}}{source}{{% endif {closing}"
