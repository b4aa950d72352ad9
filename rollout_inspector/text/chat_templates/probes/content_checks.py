"""Checks of what a render holds: system prompts, tools, BOS, dates, control tokens."""

import re

from rollout_inspector.streams.prefix import common_length
from rollout_inspector.streams.recorded_renders import NOW
from rollout_inspector.streams.snippets import quoted
from rollout_inspector.text.chat_templates.probes.message_shape import TOOLS, system, user
from rollout_inspector.text.chat_templates.probes.render_cache import CheckFunction, RenderCache
from rollout_inspector.text.chat_templates.probes.report import Check, Purpose


def default_system(cache: RenderCache) -> Check:
    """Does a conversation without a system message get one?"""
    question = Check("default_system", "A system prompt that nobody wrote", Purpose.FACTS, decisive=False)
    bare, with_system = cache.renders(
        cache.conversation([user("UQ1")]), cache.conversation([system("SYSX1"), user("UQ1")])
    )
    if failed := question.raised(bare):
        return failed
    head = bare.text[: bare.text.index("UQ1")] if "UQ1" in bare.text else ""
    for _, token in cache.control_tokens(head):
        head = head.replace(token, " ")
    if len(re.findall(r"[A-Za-z]{2,}", head)) < 4:
        return question.ok("Without a system message the render has none.")
    head = " ".join(head.split())
    replaced = not with_system.error and head[:40] not in " ".join(with_system.text.split())
    detail = f"Without a system message the template writes its own: {quoted(head, 80)}" + (
        "; a given one replaces it, so a delta rendered alone gets it again."
        if replaced
        else ", beside a given one too."
    )
    return question.broken(detail, line=bare.rendered.line_at(0))


def system_supported(cache: RenderCache) -> Check:
    """Is a system message rendered?"""
    question = Check("system_supported", "A system message is rendered", Purpose.FACTS, decisive=False)
    side = cache.side(cache.conversation([system("SYSX1"), user("UQ1")]))
    if failed := question.raised(side):
        return failed
    if "SYSX1" in side.text:
        return question.ok("A given system message is rendered.")
    return question.unsupported("A system message vanishes without a word.")


def tools_rendered(cache: RenderCache) -> Check:
    """Are tool definitions rendered?"""
    question = Check("tools_rendered", "Tool definitions are rendered", Purpose.FACTS, decisive=False)
    offered = cache.tools or list(TOOLS)
    side = cache.side(cache.conversation([user("UQ1")], True)._replace(tools=offered))
    if failed := question.raised(side):
        return failed
    tool_name = str(offered[0].get("function", offered[0]).get("name", ""))
    if tool_name and tool_name in side.text:
        return question.ok("The render names the tools.")
    return question.unsupported("Tools vanish without a word: the model never sees them.")


def bos_once(cache: RenderCache) -> Check:
    """Is there one BOS, and what if the text is encoded with special tokens added?"""
    question = Check("bos_once", "One BOS", Purpose.REPRODUCIBLE)
    bos = cache.codec.bos_id
    side = cache.side(cache.conversation([user("UQ1"), cache.form.assistant("ANSX1"), user("UQ2")], True))
    if failed := question.raised(side):
        return failed
    if bos is None:
        return question.unsupported("The tokenizer has no BOS token.", decisive=False)
    places = [n for n, token_id in enumerate(side.ids.tolist()) if token_id == bos]
    if len(places) > 1:
        detail = f"The render holds BOS {len(places)} times, at the tokens {places[:4]}."
        return question.broken(detail, line=side.rendered.line_at(side.char_of(places[1])))
    if not places:
        return question.ok("The template writes no BOS; the engine may add one.")
    return question.ok(
        "The template writes BOS itself: never encode its text with special tokens added, or there are two."
    )


def dates(cache: RenderCache) -> Check:
    """Does the render depend on the day?"""
    question = Check("dates", "No date in the render", Purpose.REPRODUCIBLE)
    if not cache.renderer.reads_clock:
        return question.ok("The template does not ask for the date.")
    conversations = [cache.conversation([system("SYSX1"), user("UQ1")], True), cache.conversation([user("UQ1")], True)]
    today = cache.renders(*conversations)
    later = cache.renderer.render_many(
        [render._replace(kwargs={**(render.kwargs or {}), NOW: "2027-02-28T13:30:00"}) for render in conversations]
    )
    for render, other in zip(today, later, strict=True):
        if not render.error and other.ok and render.text != other.text:
            place = common_length(render.text, other.text)
            line = render.rendered.line_at(place)
            excerpt = quoted(render.text[render.text.rfind(" ", 0, max(0, place - 8)) + 1 :], 24)
            where = "" if line is None else f", line {line}"
            detail = (
                f"The render holds today's date ({excerpt}{where}): a run across midnight changes its prompts. "
                "Pass the date as a kwarg, or freeze the system text."
            )
            return question.broken(detail, line=line)
    return question.ok("The template asks for the date but writes none here.")


def control_text(cache: RenderCache) -> Check:
    """Can the text of a message close the turn?"""
    question = Check("control_text_in_content", "Content that spells a control token", Purpose.FACTS, decisive=False)
    stop = cache.stop_text()
    if stop is None:
        return question.unsupported("There is no stop token to spell.")
    side = cache.side(cache.conversation([user(f"UQ1 {stop} UQ2")]))
    if failed := question.raised(side):
        return failed
    start = side.text.find("UQ1")
    if start < 0 or stop not in side.text[start : side.text.find("UQ2", start)]:
        return question.ok("The template rewrites such text.")
    detail = (
        f"A message that contains {stop!r} writes the real control token when the render is encoded as one text. "
        "Encode content apart, with control tokens split, if the text is not trusted."
    )
    return question.broken(detail, line=side.rendered.line_at(start))


CONTENT_CHECKS: tuple[CheckFunction, ...] = (
    default_system, system_supported, tools_rendered, bos_once, dates, control_text,
)
