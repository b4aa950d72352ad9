"""The interfaces of a tokenizer and of a chat template, as the pure code uses them. No implementation."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.streams.trajectory import Ids, Message


class Codec(Protocol):
    """A tokenizer as the diagnosis uses it, for example ``rollout_inspector.text.tokenizers.LoadedTokenizer``."""

    name: str
    vocab_size: int  # Ids run from 0 to ``vocab_size - 1``, added tokens included.
    bos_id: int | None
    eos_id: int | None
    special_ids: frozenset[int]  # Control tokens: added tokens that the encoder matches before anything else.

    def token_bytes(self, ids: Ids) -> list[bytes]:
        """The bytes of each id; ``b""`` for an id outside the vocabulary."""
        ...

    def joined_bytes(self, ids: Ids) -> tuple[bytes, NDArray[np.int64]]:
        """Returns ``b"".join(token_bytes(ids))``, and for each id ``[n]`` the offset at which its bytes end."""
        ...

    def decode(self, ids: Ids) -> str:
        """The text of ids, special tokens kept. Bytes that are not UTF-8 become U+FFFD."""
        ...

    def encode(self, text: str) -> Ids:
        """The ids ``[n]`` of a text. Control tokens are recognised; nothing is added (no BOS)."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]: ...

    def __hash__(self) -> int: ...  # caches that depend on the tokenizer alone use it as their key


class Conversation(NamedTuple):
    """The input of one render."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool = False


class RenderFailed(Exception):
    """The chat template raised, ran too long or wrote too much. The message says which."""


class Renderer(Protocol):
    """A chat template bound to a tokenizer. ``chat_templates`` makes them; each call runs in the sandbox."""

    chat_template_sha256: str

    def render_text(self, conversation: Conversation) -> str:
        """The rendered conversation. Raises :class:`RenderFailed`."""
        ...

    def render_ids(self, conversation: Conversation) -> Ids:
        """The rendered conversation encoded as one text. Raises :class:`RenderFailed`."""
        ...


@runtime_checkable
class Foresees(Renderer, Protocol):
    """A renderer that makes many renders in one call, before they are needed."""

    def foresee(self, asks: Sequence[Conversation]) -> Any:
        """Render all of ``asks``. May run in another thread. Never raises because of a template. Later calls find these
        renders only if they pass the very same message objects."""
        ...

    def use(self, foreseen: Any) -> None:
        """Answer from these renders from now on."""
        ...
