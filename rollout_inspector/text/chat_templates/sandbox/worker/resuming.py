"""Renders of growing conversations: each render continues the render before it.

Most templates write message by message, in one loop at the top. If a conversation begins like the one before it, the
loop's body is not run again for the messages that both have: their text is reused. This is right if a body depends
only on its message, the messages before it, the next message, and what does not change. So a template that carries
values from body to body is never resumed (``_walks``). When a template reads how many messages there are, this is noted
(``WatchedMessages``), and the text from that body on is not reused.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes

from .rendering import NONCE, GenerationTracker, SandboxLimits, TooMuchOutput, environment, render_plain


class ResumableRender:
    """One render of a series: how far it is, and what the next render can reuse of it."""

    def __init__(self, messages: list[int], fixed: tuple[Any, ...]) -> None:
        self.messages, self.fixed = messages, fixed  # Indices of its messages; tools and kwargs.
        self.text = ""
        self.pieces: list[str] = []
        self.spans: list[tuple[int, int]] = []
        self.marks: list[tuple[int, int]] = []  # At the start of each body: characters written, spans noted.
        self.ends: list[tuple[int, int] | None] = []
        """The same at the end of each body; None where the body may have looked at the message behind its own."""
        self.begun = self.pulled = 0
        """Bodies begun, and messages that the loop has asked for: one more if a body looked at the next message."""
        self.saw_next = False
        self.alike: int | None = None
        """Bodies before the first that could see how many messages there are; None = no body could."""
        self.skipped = 0
        self.earlier: ResumableRender | None = None

    def sees_the_end(self) -> None:
        """Note that this body, and so each later one, may depend on how many messages there are."""
        if self.alike is None:
            self.alike = self.begun - 1

    def go_on_from(self, earlier: ResumableRender | None) -> None:
        """Skip the messages that both have; the last of them only if its body did not look at the next message."""
        if earlier is None or earlier.fixed != self.fixed:
            return
        both = 0
        for ours, theirs in zip(self.messages, earlier.messages, strict=False):
            if ours != theirs:
                break
            both += 1
        alike = both if earlier.alike is None else earlier.alike
        n = max(0, min(both, alike, len(earlier.marks), len(self.messages) - 1))
        if n and n in (both, len(earlier.marks)) and earlier.ends[n - 1] is None:
            n -= 1
        self.skipped, self.earlier = n, earlier

    def walk(self, messages: Any) -> Any:
        """What the loop walks over."""
        if isinstance(messages, WatchedMessages):
            return LoopMessages(list.copy(messages), self)
        self.sees_the_end()  # the template made another list of them
        return messages

    def begins_body(self, message: Any) -> bool:
        """Whether the next body is to be run."""
        n = self.begun
        self.begun += 1
        self.saw_next = False
        if n < self.skipped:
            return False
        if n == self.skipped and n and self.earlier is not None:
            before = self.earlier
            written, n_spans = before.marks[n] if n < len(before.marks) else before.ends[n - 1] or (0, 0)
            if "".join(self.pieces) != before.text[: before.marks[0][0]]:
                raise ValueError("what stands before the first message is not the same")
            self.marks, self.ends = before.marks[:n], before.ends[:n]
            self.pieces[:] = [before.text[:written]]
            GenerationTracker.spans[:] = before.spans[:n_spans]
            GenerationTracker.written = written
        self.marks.append((GenerationTracker.written, len(GenerationTracker.spans)))
        self.ends.append(None)
        return True

    def ends_body(self, message: Any) -> None:
        """Note where the body ended, unless it has looked at the next message."""
        if self.pulled == self.begun and not self.saw_next:
            self.ends[-1] = GenerationTracker.written, len(GenerationTracker.spans)


class WatchedMessages(list[Any]):
    """The messages as a template sees them. It notes every access that tells how many messages there are."""

    def __init__(self, values: list[Any], render: ResumableRender) -> None:
        super().__init__(values)
        self._render = render  # a name that no template can reach

    def __bool__(self) -> bool:
        return list.__len__(self) > 0  # no render that is resumed has none

    def __getitem__(self, index: Any) -> Any:
        if type(index) is not int or not 0 <= index <= self._render.begun:
            self._render.sees_the_end()
        elif index == self._render.begun:
            self._render.saw_next = True
        return list.__getitem__(self, index)

    def __radd__(self, other: Any) -> Any:
        self._render.sees_the_end()
        return other + list(self)


class LoopMessages(list[Any]):
    """The messages as the loop walks over them."""

    def __init__(self, values: list[Any], render: ResumableRender) -> None:
        super().__init__(values)
        self._render = render  # a name that no template can reach

    def __iter__(self) -> Iterator[Any]:
        for value in super().__iter__():
            self._render.pulled += 1
            yield value
        self._render.pulled += 1


def _noted(name: str) -> Any:
    real = getattr(list, name)

    def look(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._render.sees_the_end()
        return real(self, *args, **kwargs)

    return look


for _name in ("__len__", "__iter__", "__reversed__", "__contains__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__",
              "__ge__", "__add__", "__mul__", "__rmul__", "__repr__", "index", "count", "copy"):
    setattr(WatchedMessages, _name, _noted(_name))
LoopMessages.__len__ = _noted("__len__")  # type: ignore[method-assign]

_WALK, _BEGINS, _ENDS = f"walk{NONCE}", f"begins{NONCE}", f"ends{NONCE}"
RESUMABLE = environment(provenance=False)


def _tell(render: ResumableRender) -> None:
    """Connect the loop of each template to this render. A template looks the functions up when it begins."""
    RESUMABLE.filters[_WALK] = render.walk
    RESUMABLE.tests[_BEGINS], RESUMABLE.tests[_ENDS] = render.begins_body, render.ends_body


_tell(ResumableRender([], ()))
_CARRIES = frozenset({"namespace", "cycler", "joiner", "lipsum", "caller"})
_ODD_FILTERS = frozenset({"random", "pprint", "attr"})
_LAZY = frozenset(
    {"map", "select", "reject", "selectattr", "rejectattr", "batch", "slice", "reverse", "items", "unique"}
)
"""Filters whose value can be read only once."""


def _walks(tree: nodes.Template) -> nodes.For | None:
    """The loop over the messages, if each run of its body depends on the messages alone; else None."""
    loops = [node for node in tree.body if isinstance(node, nodes.For) and _is_name(node.iter, "messages")]
    if len(loops) != 1 or not isinstance(loops[0].target, nodes.Name):
        return None
    loop, place = loops[0], tree.body.index(loops[0])
    before, upto = nodes.Template(tree.body[:place]), nodes.Template(tree.body[: place + 1])
    is_odd = (
        bool(loop.test or loop.else_ or loop.recursive)
        or any(node.name in _CARRIES for node in tree.find_all(nodes.Name))
        or any(node.name in _ODD_FILTERS for node in tree.find_all(nodes.Filter))
        or any(node.attr == "changed" for node in tree.find_all(nodes.Getattr))
        or any(node.value == "changed" for node in tree.find_all(nodes.Const))
        or any(True for _ in tree.find_all((nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)))
        or any(_is_name(node, "add_generation_prompt") for node in upto.find_all(nodes.Name))
        or any(
            node.name in _LAZY
            for assignment in before.find_all(nodes.Assign)
            for node in assignment.find_all(nodes.Filter)
        )
    )
    return None if is_odd else loop


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name


@lru_cache(maxsize=16)
def resumable(text: str) -> jinja2.Template | None:
    """The template, changed so that its loop reports where each body begins and ends; None = it cannot be resumed."""
    tree = RESUMABLE.parse(text)
    loop = _walks(tree)
    if loop is None:
        return None
    assert isinstance(loop.target, nodes.Name)
    message = nodes.Name(loop.target.name, "load")
    begins, ends = (nodes.Test(message, name, [], [], None, None) for name in (_BEGINS, _ENDS))
    loop.iter = nodes.Filter(loop.iter, _WALK, [], [], None, None)
    end = nodes.ExprStmt(ends)
    loop.body = [nodes.If(begins, [*loop.body, end], [], [])]
    for node in (message, begins, ends, end, loop.iter, loop.body[0]):
        node.set_lineno(loop.lineno).set_environment(RESUMABLE)
    code = RESUMABLE.compile(tree)
    return RESUMABLE.template_class.from_code(RESUMABLE, code, dict(RESUMABLE.globals), lambda: True)


TRIES = 8  # How many resumed renders of a template are compared with a full render.
_tried: dict[str, int] = {}  # Template -> how many resumed renders were equal to the full render; -1 = one was not.


def render_growing(
    text: str, variables: dict[str, Any], here: ResumableRender, earlier: ResumableRender | None
) -> dict[str, Any]:
    """As :func:`render_plain`, but it continues an earlier render where both are the same."""
    answered = None
    try:
        template = resumable(text) if here.messages and _tried.get(text, 0) >= 0 else None
        if template is not None:
            answered = _resumed(template, variables, here, earlier)
    except Exception:  # the plain render below says what is wrong, and where
        here.marks = []
    if answered is None:
        return render_plain(text, variables)
    if here.skipped and _tried.get(text, 0) < TRIES:
        plain = render_plain(text, variables)
        _tried[text] = _tried.get(text, 0) + 1 if plain == answered else -1
        return plain
    return answered


def _resumed(
    template: jinja2.Template, variables: dict[str, Any], here: ResumableRender, earlier: ResumableRender | None
) -> dict[str, Any]:
    _tell(here)
    here.go_on_from(earlier)
    GenerationTracker.spans, GenerationTracker.written = here.spans, 0
    watched = {**variables, "messages": WatchedMessages(variables["messages"], here)}
    for chunk in template.root_render_func(template.new_context(watched)):
        here.pieces.append(chunk)
        GenerationTracker.written += len(chunk)
        if GenerationTracker.written > SandboxLimits.output_chars:
            raise TooMuchOutput
    here.text = "".join(here.pieces)
    here.pieces, here.earlier = [], None
    return {"text": here.text, "tracked_spans": here.spans}
