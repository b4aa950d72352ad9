"""Checks of what is rendered after an answer: the stop token and what follows it, dummy bases, message by message."""

from rollout_inspector.streams.prefix import common_length
from rollout_inspector.streams.snippets import quoted
from rollout_inspector.streams.trajectory import Message
from rollout_inspector.text.chat_templates.probes.compare import RenderComparison, token_start
from rollout_inspector.text.chat_templates.probes.message_shape import CALC, system, user
from rollout_inspector.text.chat_templates.probes.render_cache import CheckFunction, RenderCache
from rollout_inspector.text.chat_templates.probes.report import Check, Purpose


def seam(cache: RenderCache) -> Check:
    """What stands between the token the model stops at and the next header."""
    question = Check("seam", "What follows the sampled stop token", Purpose.FACTS, decisive=False)
    ask, answer, later = user("UQ1"), cache.form.assistant("ANSX1"), user("UQ2")
    once, twice = cache.renders(cache.conversation([ask, answer]), cache.conversation([ask, answer, later]))
    if failed := question.raised(once, twice):
        return failed
    if "ANSX1" not in twice.text or "ANSX1" not in once.text:
        return question.unsupported("The answer is not rendered.")
    stop = cache.stop_text()
    if stop is None:
        following = cache.control_tokens(twice.text[twice.text.rindex("ANSX1") + 5 :])
        if not following:
            return question.broken(
                "The template writes no control token after an answer, so nothing marks where the model stops."
            )
        return question.broken(
            f"The template writes no stop token after an answer: the model stops at the next header, "
            f"{following[0][1]!r}. A delta brings that token again, so one of the two must be dropped, with its mask "
            "and logprob."
        )
    tail = once.text[once.text.index(stop, once.text.rindex("ANSX1") + 5) + len(stop) :]
    if not tail:
        return question.ok(f"The model stops at {stop!r} and the template writes nothing after it.")
    line = once.rendered.line_at(len(once.text) - 1)
    where = "" if line is None else f" (line {line})"
    detail = (
        f"The model stops at {stop!r}; the template then writes {tail!r}{where}, which nobody samples. A delta "
        "must bring it, with mask 0: cut the dummy prefix at its last stop token."
    )
    return question.broken(detail, line=line)


def fixed_base(name: str, title: str, in_call: bool) -> CheckFunction:
    """The check whether a fixed dummy base yields the same delta as the real conversation. ``in_call``: the base ends
    in a call, else in a user message."""
    question = Check(name, title, Purpose.FIXED_BASE)

    def answer(cache: RenderCache) -> Check:
        form = cache.form
        real: list[Message] = [system("SYSX1"), user("UQ1"), form.call((CALC, {"expr": "ARGX1"}), content="CONX1")]
        if not form.calls:
            return question.unsupported("The template renders no tool calls.")
        base: list[Message] = [system("dummy"), user("dummy")]
        if in_call:
            base.append(form.call((CALC, {"expr": "dummy"})))
        sides = cache.renders(*(
            cache.conversation(messages, prompt)
            for delta in (real, base)
            for messages, prompt in ((delta, False), ([*delta, form.result(CALC, "RESX9")], True))
        ))
        if failed := question.raised(*sides):
            return failed
        real_delta, base_delta = RenderComparison(sides[0], sides[1]), RenderComparison(sides[2], sides[3])
        if not real_delta.text_passed:
            return question.unsupported(
                "There is no delta to compare with: appending the result changes what was rendered before."
            )
        if not base_delta.text_passed:
            return question.broken("The base itself changes when the result is appended.", comparison=base_delta)
        real_text, base_text = real_delta.delta_text or "", base_delta.delta_text or ""
        if real_text == base_text and real_delta.delta_ids.tolist() == base_delta.delta_ids.tolist():
            return question.ok(f"The delta is {base_text!r} either way.")
        detail = f"The base gives {quoted(base_text, 80)} where the conversation has {quoted(real_text, 80)}."
        first = len(real_delta.before.text) + common_length(real_text, base_text)
        return question.broken(detail, line=real_delta.after.rendered.line_at(first))

    return answer


def generation_prompt_written(cache: RenderCache) -> Check:
    """Does asking for the generation prompt add one?"""
    question = Check("generation_prompt_written", "The template writes a generation prompt", Purpose.GENERATION)
    ask = user("UQ1")
    without, prompted, answered = cache.renders(
        cache.conversation([ask]),
        cache.conversation([ask], True),
        cache.conversation([ask, cache.form.assistant("ANSX1")]),
    )
    if failed := question.raised(without, prompted, answered):
        return failed
    if without.text != prompted.text:
        added = prompted.text[common_length(without.text, prompted.text) :]
        return question.ok(f"It is {added!r}.", decisive=False)
    start = common_length(without.text, answered.text)
    header = answered.text[start:].partition("ANSX1")[0].strip()
    if header:
        detail = f"add_generation_prompt changes nothing: the model must write {header!r} itself, or is never prompted."
        return question.broken(detail, decisive=False, line=answered.rendered.line_at(start))
    detail = "add_generation_prompt changes nothing here: what follows a user message already prompts the model."
    return question.unsupported(detail, decisive=False)


def per_message(cache: RenderCache) -> Check:
    """Is the render of a conversation the joined renders of its messages?"""
    question = Check("per_message", "Each message rendered alone", Purpose.PER_MESSAGE)
    messages: list[Message] = [system("SYSX1"), user("UQ1"), cache.form.assistant("ANSX1"), user("UQ2")]
    whole, *alone = cache.renders(cache.conversation(messages), *(cache.conversation([m]) for m in messages))
    if failed := question.raised(whole):
        return failed
    if failed := question.raised(*alone):
        return question.broken(f"A message alone cannot be rendered: {failed.detail}", line=failed.line)
    joined = "".join(side.text for side in alone)
    if joined == whole.text:
        return question.ok("The joined renders are the render of the conversation.")
    shared = common_length(joined, whole.text)
    joined_tail, other = (quoted(text[token_start(text, shared) :], 40) for text in (joined, whole.text))
    detail = f"Joined, the renders have {joined_tail} where the conversation has {other}."
    return question.broken(detail, line=whole.rendered.line_at(shared))


DELTA_CHECKS: tuple[CheckFunction, ...] = (
    seam, fixed_base("fixed_base_call", "Delta on a dummy base that ends in a call", in_call=True),
    fixed_base("fixed_base_user", "Delta on a dummy base that ends in a user turn", in_call=False),
    generation_prompt_written, per_message,
)
