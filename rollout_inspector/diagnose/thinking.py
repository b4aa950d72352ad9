"""Breaks around reasoning: think blocks that come and go, are left out, or are parsed wrong."""

import re
from functools import lru_cache

from rollout_inspector.diagnose.breaks import Break
from rollout_inspector.diagnose.finding import Fault
from rollout_inspector.diagnose.template import agrees_past, foreign
from rollout_inspector.streams import messages as msg
from rollout_inspector.streams.prefix import common_length
from rollout_inspector.streams.snippets import counted

# No part is unbounded, so that hostile text costs no more time than its length.
_WORD = r"(?:[\w:.\-]{0,20}(?:think|thought|reason|reflection)[\w:.\-]{0,20})"
# Markers as templates write them: <think>, [THINK], <|think|>, ◁think▷; and a channel of reasoning.
_PAIRS = (
    (rf"<\|?{_WORD}\|?>", rf"<\|?/\|?{_WORD}\|?>"),
    (rf"<\|?(?:begin|start)_of_{_WORD}\|?>", rf"<\|?end_of_{_WORD}\|?>"),
    (rf"\[{_WORD}\]", rf"\[/{_WORD}\]"),
    (rf"◁{_WORD}▷", rf"◁/{_WORD}▷"),
    (
        r"<\|channel\|>(?:analysis|thinking|thought)<\|message\|>",
        r"<\|end\|>(?:<\|start\|>assistant(?=<\|channel\|>| to=))?",
    ),
)
_FLAGS = re.IGNORECASE | re.DOTALL
OPEN = re.compile("|".join(f"(?:{a})" for a, _ in _PAIRS), _FLAGS)
CLOSE = re.compile("|".join(f"(?:{b})" for _, b in _PAIRS[:-1]), _FLAGS)
_BLOCKS = tuple(re.compile(f"(?:{a})(?P<body>.*?)(?:{b})", _FLAGS) for a, b in _PAIRS)
_SPACE = re.compile(r"\s+")


def empty_think_toggled(b: Break) -> Fault | None:
    """The removed or inserted text is an opening marker, white space and a closing marker."""
    if b.case.codec is None:
        return None
    texts = _both_texts(b)
    for removed, (old, new) in ((True, texts), (False, texts[::-1])):
        if (body := lone_block(old, new)) is not None and not body.strip():
            what = "is gone from" if removed else "has appeared in"
            return Fault(
                "empty_think_toggled",
                f"An empty think block {what} the prompt of step {b.index}, where an earlier turn is rendered again.",
                message_index=_place(b),
            )
    return None


def thinking_stripped(b: Break) -> Fault | None:
    """The missing text holds reasoning, no message was changed, and the difference is not in the head."""
    if b.case.codec is None:
        return None
    if b.known_messages is not None and b.start < b.head_stop and any(
        agrees_past(b.case, i, b.start) is False for i in (b.case.root(b.parent_index), b.index)
    ):
        return None  # the head differs, and one of the prompts is not its template's render
    expected, actual = _both_texts(b)
    body = lone_block(expected, actual)
    if body is None or not body.strip():
        reasoning = msg.reasoning_of(b.sent_back or {}).strip()
        if not reasoning or reasoning not in expected or reasoning in actual or foreign(b.case, b.index):
            return None
        body = reasoning
    return Fault(
        "thinking_stripped",
        f"The reasoning ({counted(len(body.split()), 'word')}) that step {b.parent_index} or an earlier one "
        f"sampled is not in the prompt of step {b.index}. Its messages still hold what was said.",
        message_index=_place(b),
    )


def reasoning_misparsed(b: Break) -> Fault | None:
    """The prompt had opened the think block. The parser missed that, and the reasoning came back as content."""
    if b.case.codec is None:
        return None
    prompt_tail = b.case.text(b.parent.prompt_ids[-48:])
    opened = [m.end() for m in OPEN.finditer(prompt_tail)]
    if not opened or CLOSE.search(prompt_tail, opened[-1]):
        return None
    sampled = b.case.text(b.parent.completion_ids)
    closed = CLOSE.search(sampled)
    if closed is None:
        return None
    if b.sent_back is not None and msg.reasoning_of(b.sent_back):
        return None
    content = msg.text_of(b.sent_back.get("content")) if b.sent_back else None
    literal = isinstance(content, str) and CLOSE.search(content) is not None
    if not literal and not sampled[: closed.start()].strip():
        return None  # the block was closed at once: there is no reasoning
    # The turn of the break, as the later prompt renders it: up to the sampled stop token, if it came back.
    start = max(0, min(b.start, len(b.parent.prompt_ids)) - 16)
    ends = b.start + b.same_turn_end(b.expected[b.start :], b.actual[b.start :])
    turn = b.case.text(b.actual[start : max(b.actual_stop, ends * (ends < len(b.actual)), start + 1)])
    twice = len(CLOSE.findall(turn)) > 1 or len(OPEN.findall(turn)) > 1
    if not twice and not (literal and CLOSE.search(turn)):
        return None
    return Fault(
        "reasoning_misparsed",
        f"The prompt of step {b.parent_index} ends inside a think block that the completion closes. It was parsed as "
        f"if there were no block, and step {b.index} sends the reasoning as content.",
        message_index=_place(b),
    )


def _both_texts(b: Break) -> tuple[str, str]:
    """Both streams as text, from the control token before the break. The sampled one ends at its end."""
    special = b.case.is_special(b.expected[: b.start])
    start = b.start
    for _ in range(4):  # markers are often control tokens: go back to the token of the turn
        before = special[:start].nonzero()[0]
        start = int(before[-1]) if before.size else max(0, start - 32)
    return b.case.text(b.expected[start:]), b.case.text(b.actual[start:])


@lru_cache(maxsize=64)
def lone_block(one: str, other: str) -> str | None:
    """The text of a think block that only ``one`` has at the first difference. Without the block both texts go on
    alike. A template that leaves the markers around nothing has removed the text too."""
    shared = common_length(one, other)
    for pattern in _BLOCKS:
        for match in pattern.finditer(one):
            start, stop = match.span()
            # White space around a block may also belong to what follows it.
            if not start - 4 <= shared <= stop:
                continue
            if shared >= match.end("body") > match.start("body"):
                continue  # both texts hold the block, and differ in its close or behind it
            without_block = _SPACE.sub("", one[:start] + one[stop:])
            head = len(_SPACE.sub("", one[:start]))
            emptied = pattern.match(other, start) if match.group("body").strip() else None
            emptied = None if emptied and emptied.group("body").strip() else emptied
            for candidate in (other, emptied and other[:start] + other[emptied.end() :]):
                compared = _SPACE.sub("", candidate or "")
                agrees = common_length(without_block, compared)
                # Where the other text ends with what stands before the block, nothing shows that it goes on alike.
                goes_on = len(compared) > head or compared == without_block
                if compared and goes_on and agrees >= min(len(without_block), len(compared), head + 12) >= head:
                    return match.group("body")
    return None


def _place(b: Break) -> int | None:
    return len(b.known_messages[0]) if b.known_messages is not None and b.in_completion else None
