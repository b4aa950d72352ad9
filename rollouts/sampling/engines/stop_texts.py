"""Stop texts: a completion ends with the token that completes one of them. That token stays part of the completion."""

from collections.abc import Sequence
from pathlib import Path

from rollout_inspector.streams.interfaces import Codec
from rollout_inspector.streams.trajectory import ids_array
from rollouts.sampling.engines.protocol import RequestRefused, Sampling


class StopTexts:
    """Looks for stop texts at the end of a completion. Loads the tokenizer for the first request with a stop text."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._codec: Codec | None = None

    def check(self, sampling: Sampling) -> None:
        """Raise :class:`RequestRefused` when there are stop texts but no tokenizer that tells the text of the ids."""
        if not sampling.stop or self._codec is not None:
            return
        from rollout_inspector.text.tokenizers import TokenizerUnusable, load

        try:
            self._codec = load(self._path)
        except (TokenizerUnusable, OSError) as error:
            raise RequestRefused(f"A stop text needs the model's tokenizer, which cannot be loaded: {error}") from error

    def completed(self, ids: Sequence[int], stop: Sequence[str]) -> str:
        """The stop text that the last id completes; empty when there is none."""
        if not stop or self._codec is None:
            return ""
        pieces = self._codec.token_bytes(ids_array(list(ids[-1 - max(len(text.encode()) for text in stop) :])))
        tail, last = b"".join(pieces), len(pieces[-1])
        for text in stop:
            stop_bytes = text.encode()
            # It must end in the last piece: an earlier one would already have ended the completion.
            place = tail.find(stop_bytes, max(0, len(tail) - last - len(stop_bytes) + 1))
            if place >= 0:
                return text
        return ""
