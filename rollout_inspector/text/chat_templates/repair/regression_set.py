"""The conversations on which a changed template is compared, and how each template renders them."""

from collections.abc import Iterable, Sequence

from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.streams.prefix import common_length
from rollout_inspector.streams.trajectory import Message
from rollout_inspector.text.chat_templates.probes.checks import all_probes, tito_post_probe
from rollout_inspector.text.chat_templates.probes.conversations import Probe, markers_of
from rollout_inspector.text.chat_templates.probes.message_shape import MessageShape
from rollout_inspector.text.chat_templates.probes.render_cache import RenderCache, key_of
from rollout_inspector.text.chat_templates.sandbox.render import TemplateRenderer

CANARIES = 12  # Conversations that must not change and are rendered first, before the rest of them.


class RegressionSet:
    """The conversations on which candidates are compared, and how the original template renders them."""

    def __init__(
        self, cache: RenderCache, own: Sequence[Message] | None = None, others: Iterable[Conversation] = ()
    ) -> None:
        """``own``: messages of the user's own conversation, probed too. Each prefix of it is a conversation: pass few.
        ``others``: further conversations to compare on, each with every prefix."""
        self.cache = cache
        self.probes = [
            tito_post_probe(MessageShape(), cache), tito_post_probe(cache.form, cache), *all_probes(cache, own),
        ]
        self.conversations: dict[str, Conversation] = {}
        for conversation in (*(member for probe in self.probes for member in probe.conversations()), *others):
            for k in range(1, len(conversation.messages) + 1):
                for prompt in (False, True):
                    self._add(conversation._replace(messages=conversation.messages[:k], add_generation_prompt=prompt))
        self._texts: dict[str, dict[str, str | None]] = {}
        self.original = self.texts(cache.template)
        self.kept = [key for key, conversation in self.conversations.items() if self._preserved(conversation)]
        """Keys of the conversations that must not change."""

    def _add(self, conversation: Conversation) -> None:
        self.conversations.setdefault(key_of(conversation), conversation)

    def texts(self, template: str, keys: Iterable[str] | None = None) -> dict[str, str | None]:
        """Key -> text of conversations (default: all); None = the template raises. Each is rendered once."""
        texts = self._texts.setdefault(template, {})
        missing = [key for key in (self.conversations if keys is None else keys) if key not in texts]
        if missing:
            renderer = TemplateRenderer(self.cache.renderer.tokenizer, template)
            outcomes = renderer.render_many([self.conversations[key] for key in missing])
            texts.update(
                (key, outcome.text if outcome.ok else None) for key, outcome in zip(missing, outcomes, strict=True)
            )
        return texts

    def _preserved(self, conversation: Conversation) -> bool:
        """Was the conversation's own history preserved: does each render that ended in an answer begin this one?"""
        messages = conversation.messages
        whole = self.original[key_of(conversation)]
        shorter = [
            self.original[key_of(conversation._replace(messages=messages[:k], add_generation_prompt=False))]
            for k in range(1, len(messages))
            if messages[k - 1]["role"] == "assistant"
        ]
        return whole is not None and all(text is not None and whole.startswith(text) for text in shorter)

    def failing(self, template: str, probes: Sequence[Probe]) -> list[Probe]:
        """Probes whose shorter render does not begin the longer."""
        pairs = [[key_of(conversation) for conversation in probe.conversations()] for probe in probes]
        texts = self.texts(template, dict.fromkeys(key for pair in pairs for key in pair))
        failed = []
        for probe, (first, other) in zip(probes, pairs, strict=True):
            before, after = texts[first], texts[other]
            if before is None or after is None or not after.startswith(before):
                failed.append(probe)
        return failed

    def is_hopeless(self, probe: Probe) -> bool:
        """Must both renders of a failed probe stay as they are?"""
        return all(key_of(conversation) in self.kept for conversation in probe.conversations())

    def moves(self, template: str, base: str, probes: Sequence[Probe]) -> bool:
        """Do the two templates render a conversation of these probes differently?"""
        keys = dict.fromkeys(key_of(conversation) for probe in probes for conversation in probe.conversations())
        texts, other = self.texts(template, keys), self.texts(base, keys)
        return any(texts[key] != other[key] for key in keys)

    def keeps(self, template: str) -> bool:
        """Does everything that was preserved render as before? The conversations that refuted earlier candidates are
        rendered first."""
        for start, stop in ((0, CANARIES), (CANARIES, len(self.kept))):
            keys = self.kept[start:stop]
            texts = self.texts(template, keys)
            for key in keys:
                if texts[key] != self.original[key]:
                    self.kept.remove(key)
                    self.kept.insert(0, key)
                    return False
        return True

    def loses(self, template: str) -> bool:
        """Does a conversation no longer show a word of its messages that the original shows?"""
        texts = self.texts(template)
        return any(
            marker in (self.original[key] or "") and marker not in (texts[key] or "")
            for key, conversation in self.conversations.items()
            for marker in markers_of(conversation.messages)
        )

    def places(self, template: str, probes: Sequence[Probe]) -> list[tuple[int | None, int | None]]:
        """For each probe the template lines that wrote the two sides of its first difference."""
        pairs = [probe.conversations() for probe in probes]
        renderer = TemplateRenderer(self.cache.renderer.tokenizer, template)
        outcomes = renderer.render_many([conversation for pair in pairs for conversation in pair], lines=True)
        places = []
        for before, after in zip(outcomes[::2], outcomes[1::2], strict=True):
            if before.ok and after.ok:
                char = common_length(before.text, after.text)
                places.append((before.line_at(char), after.line_at(char)))
            else:
                places.append((before.line, after.line))
        return places

    def changed(self, template: str) -> tuple[tuple[Conversation, str, str], ...]:
        """The conversations that render differently, with or without the generation prompt, each once; both renders. A
        conversation has the generation prompt only where the render without it stays."""
        texts = self.texts(template)
        changes: dict[str, tuple[Conversation, str, str]] = {}
        for key, conversation in self.conversations.items():  # without the generation prompt first
            before, after = self.original[key], texts[key]
            if before != after:
                name = key_of(conversation._replace(add_generation_prompt=False))
                changes.setdefault(name, (conversation, before or "", after or ""))
        return tuple(changes.values())
