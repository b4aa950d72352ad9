"""Checks that are no plain prefix question: the seam, fixed bases, message by message, masks, content, dates, BOS."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from rollouts.chat_templates.probes.compare import RenderComparison, RenderSide, common_length, token_start
from rollouts.chat_templates.probes.message_shape import CALC, TOOLS, MessageShape, system, user
from rollouts.chat_templates.probes.render_cache import RenderCache
from rollouts.chat_templates.probes.report import Check, CheckStatus, Purpose
from rollouts.chat_templates.sandbox.render import Conversation
from rollouts.tito.snippets import quoted, quoted_or_nothing
from rollouts.tito.trajectory import Message

Judge = Callable[[RenderCache], Check]


def raised(name: str, title: str, purpose: Purpose, side: RenderSide, decisive: bool = True) -> Check:
    """The check of a probe that the template raises on."""
    place = _message_that_raises(side)
    return Check(
        name, title, purpose, CheckStatus.RAISES, f"{side.error}{place}", decisive, failed=side, line=side.error_line
    )


def _message_that_raises(side: RenderSide) -> str:
    messages = side.conversation.messages
    if side.error_kind != "raises" or not messages:
        return ""
    return f" (with the messages {', '.join(str(message.get('role')) for message in messages)})."


def unsupported(name: str, title: str, purpose: Purpose, detail: str, decisive: bool = True, **more: Any) -> Check:
    """The check of a property that this template has no place for."""
    return Check(name, title, purpose, CheckStatus.UNSUPPORTED, detail, decisive, **more)


def control_tokens(cache: RenderCache, text: str) -> list[tuple[int, str]]:
    """Offset and text of the control tokens in a text: the tokenizer's own, else what looks like one."""
    return [(found.start(), found.group()) for found in cache.control_pattern.finditer(text)]


def stop_text(cache: RenderCache) -> str | None:
    """The control token that the template writes right after an answer; None when the answer's end is open."""
    ask, answer = user("UQ1"), cache.form.assistant("ANSX1")
    once = cache.side(cache.conversation([ask, answer]))
    if once.error or "ANSX1" not in once.text:
        return None
    after = once.text[once.text.rindex("ANSX1") + 5 :]
    found = control_tokens(cache, after)
    return found[0][1] if found and not after[: found[0][0]].strip() else None


def seam(cache: RenderCache) -> Check:
    """What stands between the token the model stops at and the next header."""
    name, title = "seam", "What follows the sampled stop token"
    ask, answer, later = user("UQ1"), cache.form.assistant("ANSX1"), user("UQ2")
    once, twice = cache.renders(cache.conversation([ask, answer]), cache.conversation([ask, answer, later]))
    for side in (once, twice):
        if side.error:
            return raised(name, title, Purpose.FACTS, side, decisive=False)
    if "ANSX1" not in twice.text or "ANSX1" not in once.text:
        return unsupported(name, title, Purpose.FACTS, "The answer is not rendered.", decisive=False)
    stop = stop_text(cache)
    if stop is None:
        after = twice.text[twice.text.rindex("ANSX1") + 5 :]
        following = control_tokens(cache, after)
        if following:
            token = following[0][1]
            detail = (
                f"The template writes no stop token after an answer: the model stops at the next header, {token!r}. "
                "A delta brings that token again, so one of the two must be dropped, with its mask and logprob."
            )
        else:
            detail = "The template writes no control token after an answer, so nothing marks where the model stops."
        return Check(name, title, Purpose.FACTS, CheckStatus.BROKEN, detail, decisive=False)
    place = once.text.rindex("ANSX1") + 5
    tail = once.text[once.text.index(stop, place) + len(stop) :]
    if not tail:
        detail = f"The model stops at {stop!r} and the template writes nothing after it."
        return Check(name, title, Purpose.FACTS, CheckStatus.OK, detail, decisive=False)
    line = once.provenance.line_at(len(once.text) - 1)
    detail = (
        f"The model stops at {stop!r}; the template then writes {tail!r} (line {line}), which nobody samples. A delta "
        "must bring it, with mask 0: cut the dummy prefix at its last stop token."
    )
    return Check(name, title, Purpose.FACTS, CheckStatus.BROKEN, detail, decisive=False, line=line)


def _delta(
    cache: RenderCache, base: Sequence[Message], new: Sequence[Message]
) -> tuple[RenderComparison, RenderSide | None]:
    shorter, longer = cache.renders(cache.conversation(base), cache.conversation([*base, *new], True))
    failed = next((side for side in (shorter, longer) if side.error), None)
    return RenderComparison(shorter, longer), failed


def fixed_base(name: str, title: str, in_call: bool) -> Judge:
    """Is the delta that a fixed dummy base gives the one that the real conversation gives?"""

    def answer(cache: RenderCache) -> Check:
        form = cache.form
        new = [form.result(CALC, "RESX9")]
        real = [system("SYSX1"), user("UQ1"), form.call((CALC, {"expr": "ARGX1"}), content="CONX1")]
        if not form.calls:
            return unsupported(name, title, Purpose.FIXED_BASE, "The template renders no tool calls.")
        base = [system("dummy"), user("dummy"), *([form.call((CALC, {"expr": "dummy"}))] if in_call else [])]
        (real_delta, real_failed), (base_delta, base_failed) = _both(cache, real, base, new)
        failed = real_failed or base_failed
        if failed is not None:
            return raised(name, title, Purpose.FIXED_BASE, failed)
        if not real_delta.text_passed:
            detail = "There is no delta to compare with: appending the result changes what was rendered before."
            return unsupported(name, title, Purpose.FIXED_BASE, detail)
        if not base_delta.text_passed:
            detail = "The base itself changes when the result is appended."
            return Check(name, title, Purpose.FIXED_BASE, CheckStatus.BROKEN, detail, comparison=base_delta)
        expected, actual = real_delta.delta_text, base_delta.delta_text
        if expected == actual and real_delta.delta_ids.tolist() == base_delta.delta_ids.tolist():
            return Check(name, title, Purpose.FIXED_BASE, CheckStatus.OK, f"The delta is {actual!r} either way.")
        given, wanted = quoted(actual or "", 80), quoted(expected or "", 80)
        detail = f"The base gives {given} where the conversation has {wanted}."
        return Check(
            name, title, Purpose.FIXED_BASE, CheckStatus.BROKEN, detail, line=_delta_line(real_delta, base_delta)
        )

    return answer


def _both(
    cache: RenderCache, real: Sequence[Message], base: Sequence[Message], new: Sequence[Message]
) -> tuple[tuple[RenderComparison, RenderSide | None], tuple[RenderComparison, RenderSide | None]]:
    pairs = [(real, False), ([*real, *new], True), (base, False), ([*base, *new], True)]
    a, b, c, d = cache.renders(*(cache.conversation(messages, prompt) for messages, prompt in pairs))
    return (
        (RenderComparison(a, b), next((side for side in (a, b) if side.error), None)),
        (RenderComparison(c, d), next((side for side in (c, d) if side.error), None)),
    )


def _delta_line(real: RenderComparison, base: RenderComparison) -> int | None:
    shared = common_length(real.delta_text or "", base.delta_text or "")
    return real.after.provenance.line_at(len(real.before.text) + shared)


def per_message(cache: RenderCache) -> Check:
    """Is the render of a conversation the joined renders of its messages?"""
    name, title, purpose = "per_message", "Each message rendered alone", Purpose.PER_MESSAGE
    messages: list[Message] = [system("SYSX1"), user("UQ1"), cache.form.assistant("ANSX1"), user("UQ2")]
    whole, *alone = cache.renders(cache.conversation(messages), *(cache.conversation([m]) for m in messages))
    for side in (whole, *alone):
        if side.error:
            return raised(name, title, purpose, side)
    joined = "".join(side.text for side in alone)
    if joined == whole.text:
        return Check(name, title, purpose, CheckStatus.OK, "The joined renders are the render of the conversation.")
    shared = common_length(joined, whole.text)
    one, other = (quoted(text[token_start(text, shared) :], 40) for text in (joined, whole.text))
    detail = f"Joined, the renders have {one} where the conversation has {other}."
    return Check(name, title, purpose, CheckStatus.BROKEN, detail, line=whole.provenance.line_at(shared))


def default_system(cache: RenderCache) -> Check:
    """Does a conversation without a system message get one?"""
    name, title = "default_system", "A system prompt that nobody wrote"
    bare, given = cache.renders(cache.conversation([user("UQ1")]), cache.conversation([system("SYSX1"), user("UQ1")]))
    if bare.error:
        return raised(name, title, Purpose.FACTS, bare, decisive=False)
    head = bare.text[: bare.text.index("UQ1")] if "UQ1" in bare.text else ""
    for _, token in control_tokens(cache, head):
        head = head.replace(token, " ")
    words = re.findall(r"[A-Za-z]{2,}", head)
    if len(words) < 4:
        detail = "Without a system message the render has none."
        return Check(name, title, Purpose.FACTS, CheckStatus.OK, detail, decisive=False)
    replaced = not given.error and " ".join(head.split())[:40] not in " ".join(given.text.split())
    detail = f"Without a system message the template writes its own: {quoted(' '.join(head.split()), 80)}" + (
        "; a given one replaces it, so a delta rendered alone gets it again."
        if replaced
        else ", beside a given one too."
    )
    return Check(name, title, Purpose.FACTS, CheckStatus.BROKEN, detail, False, line=bare.provenance.line_at(0))


def system_supported(cache: RenderCache) -> Check:
    """Is a system message rendered?"""
    name, title = "system_supported", "A system message is rendered"
    side = cache.side(cache.conversation([system("SYSX1"), user("UQ1")]))
    if side.error:
        return raised(name, title, Purpose.FACTS, side, decisive=False)
    if "SYSX1" in side.text:
        return Check(name, title, Purpose.FACTS, CheckStatus.OK, "A given system message is rendered.", decisive=False)
    return unsupported(name, title, Purpose.FACTS, "A system message vanishes without a word.", decisive=False)


def bos_once(cache: RenderCache) -> Check:
    """Is there one BOS, and what if the text is encoded with special tokens added?"""
    name, title, purpose = "bos_once", "One BOS", Purpose.REPRODUCIBLE
    bos = cache.codec.bos_id
    side = cache.side(cache.conversation([user("UQ1"), cache.form.assistant("ANSX1"), user("UQ2")], True))
    if side.error:
        return raised(name, title, purpose, side)
    if bos is None:
        return unsupported(name, title, purpose, "The tokenizer has no BOS token.", decisive=False)
    places = [n for n, token_id in enumerate(side.ids.tolist()) if token_id == bos]
    if len(places) > 1:
        line = side.provenance.line_at(side.char_of(places[1]))
        detail = f"The render holds BOS {len(places)} times, at the tokens {places[:4]}."
        return Check(name, title, purpose, CheckStatus.BROKEN, detail, line=line)
    if not places:
        return Check(name, title, purpose, CheckStatus.OK, "The template writes no BOS; the engine may add one.")
    detail = "The template writes BOS itself: never encode its text with special tokens added, or there are two."
    return Check(name, title, purpose, CheckStatus.OK, detail)


def dates(cache: RenderCache) -> Check:
    """Does the render depend on the day?"""
    name, title, purpose = "dates", "No date in the render", Purpose.REPRODUCIBLE
    if "strftime_now" not in cache.template:
        return Check(name, title, purpose, CheckStatus.OK, "The template does not ask for the date.")
    asked = [cache.conversation([system("SYSX1"), user("UQ1")], True), cache.conversation([user("UQ1")], True)]
    today = cache.renders(*asked)
    later = cache.renderer.render_many(asked, now="2027-02-28T13:30:00")
    for one, other in zip(today, later, strict=True):
        if not one.error and other.ok and one.text != other.text:
            place = common_length(one.text, other.text)
            line = one.provenance.line_at(place)
            shown = quoted(one.text[one.text.rfind(" ", 0, max(0, place - 8)) + 1 :], 24)
            detail = (
                f"The render holds today's date ({shown}, line {line}): a run across midnight changes its prompts. "
                "Pass the date as a kwarg, or freeze the system text."
            )
            return Check(name, title, purpose, CheckStatus.BROKEN, detail, line=line)
    return Check(name, title, purpose, CheckStatus.OK, "The template asks for the date but writes none here.")


def generation_prompt_written(cache: RenderCache) -> Check:
    """Does asking for the generation prompt add one?"""
    name, title, purpose = "generation_prompt_written", "The template writes a generation prompt", Purpose.GENERATION
    ask = user("UQ1")
    without, prompted, answered = cache.renders(
        cache.conversation([ask]),
        cache.conversation([ask], True),
        cache.conversation([ask, cache.form.assistant("ANSX1")]),
    )
    for side in (without, prompted, answered):
        if side.error:
            return raised(name, title, purpose, side)
    if without.text != prompted.text:
        added = prompted.text[common_length(without.text, prompted.text) :]
        return Check(name, title, purpose, CheckStatus.OK, f"It is {added!r}.", decisive=False)
    header = answered.text[common_length(without.text, answered.text) :].partition("ANSX1")[0].strip()
    if header:
        detail = f"add_generation_prompt changes nothing: the model must write {header!r} itself, or is never prompted."
        line = answered.provenance.line_at(common_length(without.text, answered.text))
        return Check(name, title, purpose, CheckStatus.BROKEN, detail, decisive=False, line=line)
    detail = "add_generation_prompt changes nothing here: what follows a user message already prompts the model."
    return unsupported(name, title, purpose, detail, decisive=False)


def control_text(cache: RenderCache) -> Check:
    """Can the text of a tool result close the turn?"""
    name, title = "control_text_in_content", "Content that spells a control token"
    stop = stop_text(cache)
    if stop is None:
        return unsupported(name, title, Purpose.FACTS, "There is no stop token to spell.", decisive=False)
    side = cache.side(cache.conversation([user(f"UQ1 {stop} UQ2")]))
    if side.error:
        return raised(name, title, Purpose.FACTS, side, decisive=False)
    start = side.text.find("UQ1")
    inside = side.text[start : side.text.find("UQ2", start)]
    if start >= 0 and stop in inside:
        detail = (
            f"A message that contains {stop!r} writes the real control token when the render is encoded as one text. "
            "Encode content apart, with control tokens split, if the text is not trusted."
        )
        return Check(name, title, Purpose.FACTS, CheckStatus.BROKEN, detail, False, line=side.provenance.line_at(start))
    return Check(name, title, Purpose.FACTS, CheckStatus.OK, "The template rewrites such text.", decisive=False)


def content_form(name: str, title: str, build: Callable[[MessageShape], tuple[list[Message], list[Message]]]) -> Judge:
    """Is content in another form rendered like the same content as a string?"""

    def answer(cache: RenderCache) -> Check:
        one, two = cache.renders(*(Conversation(it, cache.tools, cache.kwargs) for it in build(cache.form)))
        for side in (one, two):
            if side.error:
                return raised(name, title, Purpose.FACTS, side, decisive=False)
        comparison = RenderComparison(one, two, whole=True)
        if comparison.text_passed:
            return Check(name, title, Purpose.FACTS, CheckStatus.OK, "It is rendered like a string.", False)
        lost, gained = comparison.lost_and_gained()
        here, there = (quoted_or_nothing(text) for text in (gained, lost))
        detail = f"It is rendered in another way: {here} in place of {there}."
        return Check(name, title, Purpose.FACTS, CheckStatus.BROKEN, detail, False, comparison=comparison)

    return answer


def _listed(form: MessageShape) -> tuple[list[Message], list[Message]]:
    return [user("UQ1")], [{"role": "user", "content": [{"type": "text", "text": "UQ1"}]}]


def _dict_result(form: MessageShape) -> tuple[list[Message], list[Message]]:
    call, value = form.call((CALC, {"expr": "ARGX1"})), {"value": "RESX1"}
    one, other = ([user("UQ1"), call, form.result(CALC, result)] for result in (json.dumps(value), value))
    return form.written(one), form.written(other)


def _null_content(form: MessageShape) -> tuple[list[Message], list[Message]]:
    call = form.call((CALC, {"expr": "ARGX1"}))
    return form.written([user("UQ1"), {**call, "content": ""}]), form.written([user("UQ1"), {**call, "content": None}])


def _other_arguments(form: MessageShape) -> tuple[list[Message], list[Message]]:
    other = MessageShape(**{**vars(form), "arguments": "string" if form.arguments == "dict" else "dict"})
    call = (CALC, {"expr": "ARGX1"})
    return form.written([user("UQ1"), form.call(call)]), form.written([user("UQ1"), other.call(call)])


def tools_rendered(cache: RenderCache) -> Check:
    """Are tool definitions rendered?"""
    name, title = "tools_rendered", "Tool definitions are rendered"
    offered = cache.tools or list(TOOLS)
    conversation = cache.conversation([user("UQ1")], True)
    side = cache.side(type(conversation)(conversation.messages, offered, cache.kwargs, True))
    if side.error:
        return raised(name, title, Purpose.FACTS, side, decisive=False)
    wanted = str(offered[0].get("function", offered[0]).get("name", ""))
    if wanted and wanted in side.text:
        return Check(name, title, Purpose.FACTS, CheckStatus.OK, "The render names the tools.", decisive=False)
    return unsupported(name, title, Purpose.FACTS, "Tools vanish without a word: the model never sees them.", False)


PROPERTY_CHECKS: tuple[Judge, ...] = (
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
