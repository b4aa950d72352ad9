"""Checks that are no plain prefix question: the seam, fixed bases, message by message, masks, content, dates, BOS."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from rollouts.chat_templates.probes.compare import Comparison, Side, common_length, token_start
from rollouts.chat_templates.probes.message_shape import CALC, TOOLS, Form, system, user
from rollouts.chat_templates.probes.render_cache import Bench
from rollouts.chat_templates.probes.report import Check, Purpose, Status
from rollouts.chat_templates.sandbox.render import Conversation
from rollouts.tito.snippets import quoted, quoted_or_nothing
from rollouts.tito.trajectory import Message

Judge = Callable[[Bench], Check]


def raised(name: str, title: str, purpose: Purpose, side: Side, decisive: bool = True) -> Check:
    """The check of a probe that the template raises on."""
    place = _message_that_raises(side)
    return Check(
        name, title, purpose, Status.RAISES, f"{side.error}{place}", decisive, failed=side, line=side.error_line
    )


def _message_that_raises(side: Side) -> str:
    messages = side.conversation.messages
    if side.error_kind != "raises" or not messages:
        return ""
    return f" (with the messages {', '.join(str(message.get('role')) for message in messages)})."


def unsupported(name: str, title: str, purpose: Purpose, detail: str, decisive: bool = True, **more: Any) -> Check:
    """The check of a property that this template has no place for."""
    return Check(name, title, purpose, Status.UNSUPPORTED, detail, decisive, **more)


def control_tokens(bench: Bench, text: str) -> list[tuple[int, str]]:
    """Offset and text of the control tokens in a text: the tokenizer's own, else what looks like one."""
    return [(found.start(), found.group()) for found in bench.control_pattern.finditer(text)]


def stop_text(bench: Bench) -> str | None:
    """The control token that the template writes right after an answer; None when the answer's end is open."""
    ask, answer = user("UQ1"), bench.form.assistant("ANSX1")
    once = bench.side(bench.conversation([ask, answer]))
    if once.error or "ANSX1" not in once.text:
        return None
    after = once.text[once.text.rindex("ANSX1") + 5 :]
    found = control_tokens(bench, after)
    return found[0][1] if found and not after[: found[0][0]].strip() else None


def seam(bench: Bench) -> Check:
    """What stands between the token the model stops at and the next header."""
    name, title = "seam", "What follows the sampled stop token"
    ask, answer, later = user("UQ1"), bench.form.assistant("ANSX1"), user("UQ2")
    once, twice = bench.sides(bench.conversation([ask, answer]), bench.conversation([ask, answer, later]))
    for side in (once, twice):
        if side.error:
            return raised(name, title, Purpose.FACTS, side, decisive=False)
    if "ANSX1" not in twice.text or "ANSX1" not in once.text:
        return unsupported(name, title, Purpose.FACTS, "The answer is not rendered.", decisive=False)
    stop = stop_text(bench)
    if stop is None:
        after = twice.text[twice.text.rindex("ANSX1") + 5 :]
        following = control_tokens(bench, after)
        if following:
            token = following[0][1]
            detail = (
                f"The template writes no stop token after an answer: the model stops at the next header, {token!r}. "
                "A delta brings that token again, so one of the two must be dropped, with its mask and logprob."
            )
        else:
            detail = "The template writes no control token after an answer, so nothing marks where the model stops."
        return Check(name, title, Purpose.FACTS, Status.BROKEN, detail, decisive=False)
    place = once.text.rindex("ANSX1") + 5
    tail = once.text[once.text.index(stop, place) + len(stop) :]
    if not tail:
        detail = f"The model stops at {stop!r} and the template writes nothing after it."
        return Check(name, title, Purpose.FACTS, Status.OK, detail, decisive=False)
    line = once.provenance.line_at(len(once.text) - 1)
    detail = (
        f"The model stops at {stop!r}; the template then writes {tail!r} (line {line}), which nobody samples. A delta "
        "must bring it, with mask 0: cut the dummy prefix at its last stop token."
    )
    return Check(name, title, Purpose.FACTS, Status.BROKEN, detail, decisive=False, line=line)


def _delta(bench: Bench, base: Sequence[Message], new: Sequence[Message]) -> tuple[Comparison, Side | None]:
    shorter, longer = bench.sides(bench.conversation(base), bench.conversation([*base, *new], True))
    failed = next((side for side in (shorter, longer) if side.error), None)
    return Comparison(shorter, longer), failed


def fixed_base(name: str, title: str, in_call: bool) -> Judge:
    """Is the delta that a fixed dummy base gives the one that the real conversation gives?"""

    def judge(bench: Bench) -> Check:
        form = bench.form
        new = [form.result(CALC, "RESX9")]
        real = [system("SYSX1"), user("UQ1"), form.call((CALC, {"expr": "ARGX1"}), content="CONX1")]
        if not form.calls:
            return unsupported(name, title, Purpose.FIXED_BASE, "The template renders no tool calls.")
        base = [system("dummy"), user("dummy"), *([form.call((CALC, {"expr": "dummy"}))] if in_call else [])]
        (real_delta, real_failed), (base_delta, base_failed) = _both(bench, real, base, new)
        failed = real_failed or base_failed
        if failed is not None:
            return raised(name, title, Purpose.FIXED_BASE, failed)
        if not real_delta.text_passed:
            detail = "There is no delta to compare with: appending the result changes what was rendered before."
            return unsupported(name, title, Purpose.FIXED_BASE, detail)
        if not base_delta.text_passed:
            detail = "The base itself changes when the result is appended."
            return Check(name, title, Purpose.FIXED_BASE, Status.BROKEN, detail, comparison=base_delta)
        expected, actual = real_delta.delta_text, base_delta.delta_text
        if expected == actual and real_delta.delta_ids.tolist() == base_delta.delta_ids.tolist():
            return Check(name, title, Purpose.FIXED_BASE, Status.OK, f"The delta is {actual!r} either way.")
        given, wanted = quoted(actual or "", 80), quoted(expected or "", 80)
        detail = f"The base gives {given} where the conversation has {wanted}."
        return Check(name, title, Purpose.FIXED_BASE, Status.BROKEN, detail, line=_delta_line(real_delta, base_delta))

    return judge


def _both(
    bench: Bench, real: Sequence[Message], base: Sequence[Message], new: Sequence[Message]
) -> tuple[tuple[Comparison, Side | None], tuple[Comparison, Side | None]]:
    pairs = [(real, False), ([*real, *new], True), (base, False), ([*base, *new], True)]
    a, b, c, d = bench.sides(*(bench.conversation(messages, prompt) for messages, prompt in pairs))
    return (
        (Comparison(a, b), next((side for side in (a, b) if side.error), None)),
        (Comparison(c, d), next((side for side in (c, d) if side.error), None)),
    )


def _delta_line(real: Comparison, base: Comparison) -> int | None:
    shared = common_length(real.delta_text or "", base.delta_text or "")
    return real.after.provenance.line_at(len(real.before.text) + shared)


def per_message(bench: Bench) -> Check:
    """Is the render of a conversation the joined renders of its messages?"""
    name, title, purpose = "per_message", "Each message rendered alone", Purpose.PER_MESSAGE
    messages: list[Message] = [system("SYSX1"), user("UQ1"), bench.form.assistant("ANSX1"), user("UQ2")]
    whole, *alone = bench.sides(bench.conversation(messages), *(bench.conversation([m]) for m in messages))
    for side in (whole, *alone):
        if side.error:
            return raised(name, title, purpose, side)
    joined = "".join(side.text for side in alone)
    if joined == whole.text:
        return Check(name, title, purpose, Status.OK, "The joined renders are the render of the conversation.")
    shared = common_length(joined, whole.text)
    one, other = (quoted(text[token_start(text, shared) :], 40) for text in (joined, whole.text))
    detail = f"Joined, the renders have {one} where the conversation has {other}."
    return Check(name, title, purpose, Status.BROKEN, detail, line=whole.provenance.line_at(shared))


def default_system(bench: Bench) -> Check:
    """Does a conversation without a system message get one?"""
    name, title = "default_system", "A system prompt that nobody wrote"
    bare, given = bench.sides(bench.conversation([user("UQ1")]), bench.conversation([system("SYSX1"), user("UQ1")]))
    if bare.error:
        return raised(name, title, Purpose.FACTS, bare, decisive=False)
    head = bare.text[: bare.text.index("UQ1")] if "UQ1" in bare.text else ""
    for _, token in control_tokens(bench, head):
        head = head.replace(token, " ")
    words = re.findall(r"[A-Za-z]{2,}", head)
    if len(words) < 4:
        detail = "Without a system message the render has none."
        return Check(name, title, Purpose.FACTS, Status.OK, detail, decisive=False)
    replaced = not given.error and " ".join(head.split())[:40] not in " ".join(given.text.split())
    detail = f"Without a system message the template writes its own: {quoted(' '.join(head.split()), 80)}" + (
        "; a given one replaces it, so a delta rendered alone gets it again."
        if replaced
        else ", beside a given one too."
    )
    return Check(name, title, Purpose.FACTS, Status.BROKEN, detail, False, line=bare.provenance.line_at(0))


def system_supported(bench: Bench) -> Check:
    """Is a system message rendered?"""
    name, title = "system_supported", "A system message is rendered"
    side = bench.side(bench.conversation([system("SYSX1"), user("UQ1")]))
    if side.error:
        return raised(name, title, Purpose.FACTS, side, decisive=False)
    if "SYSX1" in side.text:
        return Check(name, title, Purpose.FACTS, Status.OK, "A given system message is rendered.", decisive=False)
    return unsupported(name, title, Purpose.FACTS, "A system message vanishes without a word.", decisive=False)


def bos_once(bench: Bench) -> Check:
    """Is there one BOS, and what if the text is encoded with special tokens added?"""
    name, title, purpose = "bos_once", "One BOS", Purpose.REPRODUCIBLE
    bos = bench.codec.bos_id
    side = bench.side(bench.conversation([user("UQ1"), bench.form.assistant("ANSX1"), user("UQ2")], True))
    if side.error:
        return raised(name, title, purpose, side)
    if bos is None:
        return unsupported(name, title, purpose, "The tokenizer has no BOS token.", decisive=False)
    places = [n for n, token_id in enumerate(side.ids.tolist()) if token_id == bos]
    if len(places) > 1:
        line = side.provenance.line_at(side.char_of(places[1]))
        detail = f"The render holds BOS {len(places)} times, at the tokens {places[:4]}."
        return Check(name, title, purpose, Status.BROKEN, detail, line=line)
    if not places:
        return Check(name, title, purpose, Status.OK, "The template writes no BOS; the engine may add one.")
    detail = "The template writes BOS itself: never encode its text with special tokens added, or there are two."
    return Check(name, title, purpose, Status.OK, detail)


def dates(bench: Bench) -> Check:
    """Does the render depend on the day?"""
    name, title, purpose = "dates", "No date in the render", Purpose.REPRODUCIBLE
    if "strftime_now" not in bench.template:
        return Check(name, title, purpose, Status.OK, "The template does not ask for the date.")
    asked = [bench.conversation([system("SYSX1"), user("UQ1")], True), bench.conversation([user("UQ1")], True)]
    today = bench.sides(*asked)
    later = bench.renderer.render_many(asked, now="2027-02-28T13:30:00")
    for one, other in zip(today, later, strict=True):
        if not one.error and other.ok and one.text != other.text:
            place = common_length(one.text, other.text)
            line = one.provenance.line_at(place)
            shown = quoted(one.text[one.text.rfind(" ", 0, max(0, place - 8)) + 1 :], 24)
            detail = (
                f"The render holds today's date ({shown}, line {line}): a run across midnight changes its prompts. "
                "Pass the date as a kwarg, or freeze the system text."
            )
            return Check(name, title, purpose, Status.BROKEN, detail, line=line)
    return Check(name, title, purpose, Status.OK, "The template asks for the date but writes none here.")


def generation_prompt_written(bench: Bench) -> Check:
    """Does asking for the generation prompt add one?"""
    name, title, purpose = "generation_prompt_written", "The template writes a generation prompt", Purpose.GENERATION
    ask = user("UQ1")
    without, prompted, answered = bench.sides(
        bench.conversation([ask]),
        bench.conversation([ask], True),
        bench.conversation([ask, bench.form.assistant("ANSX1")]),
    )
    for side in (without, prompted, answered):
        if side.error:
            return raised(name, title, purpose, side)
    if without.text != prompted.text:
        added = prompted.text[common_length(without.text, prompted.text) :]
        return Check(name, title, purpose, Status.OK, f"It is {added!r}.", decisive=False)
    header = answered.text[common_length(without.text, answered.text) :].partition("ANSX1")[0].strip()
    if header:
        detail = f"add_generation_prompt changes nothing: the model must write {header!r} itself, or is never prompted."
        line = answered.provenance.line_at(common_length(without.text, answered.text))
        return Check(name, title, purpose, Status.BROKEN, detail, decisive=False, line=line)
    detail = "add_generation_prompt changes nothing here: what follows a user message already prompts the model."
    return unsupported(name, title, purpose, detail, decisive=False)


def control_text(bench: Bench) -> Check:
    """Can the text of a tool result close the turn?"""
    name, title = "control_text_in_content", "Content that spells a control token"
    stop = stop_text(bench)
    if stop is None:
        return unsupported(name, title, Purpose.FACTS, "There is no stop token to spell.", decisive=False)
    side = bench.side(bench.conversation([user(f"UQ1 {stop} UQ2")]))
    if side.error:
        return raised(name, title, Purpose.FACTS, side, decisive=False)
    start = side.text.find("UQ1")
    inside = side.text[start : side.text.find("UQ2", start)]
    if start >= 0 and stop in inside:
        detail = (
            f"A message that contains {stop!r} writes the real control token when the render is encoded as one text. "
            "Encode content apart, with control tokens split, if the text is not trusted."
        )
        return Check(name, title, Purpose.FACTS, Status.BROKEN, detail, False, line=side.provenance.line_at(start))
    return Check(name, title, Purpose.FACTS, Status.OK, "The template rewrites such text.", decisive=False)


def content_form(name: str, title: str, build: Callable[[Form], tuple[list[Message], list[Message]]]) -> Judge:
    """Is content in another form rendered like the same content as a string?"""

    def judge(bench: Bench) -> Check:
        one, two = bench.sides(*(Conversation(it, bench.tools, bench.kwargs) for it in build(bench.form)))
        for side in (one, two):
            if side.error:
                return raised(name, title, Purpose.FACTS, side, decisive=False)
        comparison = Comparison(one, two, whole=True)
        if comparison.text_passed:
            return Check(name, title, Purpose.FACTS, Status.OK, "It is rendered like a string.", False)
        lost, gained = comparison.lost_and_gained()
        here, there = (quoted_or_nothing(text) for text in (gained, lost))
        detail = f"It is rendered in another way: {here} in place of {there}."
        return Check(name, title, Purpose.FACTS, Status.BROKEN, detail, False, comparison=comparison)

    return judge


def _listed(form: Form) -> tuple[list[Message], list[Message]]:
    return [user("UQ1")], [{"role": "user", "content": [{"type": "text", "text": "UQ1"}]}]


def _dict_result(form: Form) -> tuple[list[Message], list[Message]]:
    call, value = form.call((CALC, {"expr": "ARGX1"})), {"value": "RESX1"}
    one, other = ([user("UQ1"), call, form.result(CALC, result)] for result in (json.dumps(value), value))
    return form.written(one), form.written(other)


def _null_content(form: Form) -> tuple[list[Message], list[Message]]:
    call = form.call((CALC, {"expr": "ARGX1"}))
    return form.written([user("UQ1"), {**call, "content": ""}]), form.written([user("UQ1"), {**call, "content": None}])


def _other_arguments(form: Form) -> tuple[list[Message], list[Message]]:
    other = Form(**{**vars(form), "arguments": "string" if form.arguments == "dict" else "dict"})
    call = (CALC, {"expr": "ARGX1"})
    return form.written([user("UQ1"), form.call(call)]), form.written([user("UQ1"), other.call(call)])


def tools_rendered(bench: Bench) -> Check:
    """Are tool definitions rendered?"""
    name, title = "tools_rendered", "Tool definitions are rendered"
    offered = bench.tools or list(TOOLS)
    conversation = bench.conversation([user("UQ1")], True)
    side = bench.side(type(conversation)(conversation.messages, offered, bench.kwargs, True))
    if side.error:
        return raised(name, title, Purpose.FACTS, side, decisive=False)
    wanted = str(offered[0].get("function", offered[0]).get("name", ""))
    if wanted and wanted in side.text:
        return Check(name, title, Purpose.FACTS, Status.OK, "The render names the tools.", decisive=False)
    return unsupported(name, title, Purpose.FACTS, "Tools vanish without a word: the model never sees them.", False)


FACTS: tuple[Judge, ...] = (
    seam,
    fixed_base("fixed_base_call", "Delta on a dummy base that ends in a call", in_call=True),
    fixed_base("fixed_base_user", "Delta on a dummy base that ends in a user turn", in_call=False),
    generation_prompt_written,
    per_message,
    default_system,
    system_supported,
    tools_rendered,
    bos_once,
    dates,
    control_text,
    content_form("content_as_list", "Content as a list of parts", _listed),
    content_form("result_as_object", "A tool result that is an object", _dict_result),
    content_form("content_null", "Content null beside a call", _null_content),
    content_form("arguments_other_form", "Arguments in the other form", _other_arguments),
)
