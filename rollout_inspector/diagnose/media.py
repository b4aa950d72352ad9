"""Placeholders of images, videos and sound in a row or prompt: whole, and as many as the source says.

A trainer puts one vector in place of each placeholder. A row that is cut inside them, or that holds another number of
them than the image has vectors, crashes or pairs a token with another patch:
https://github.com/TIGER-AI-Lab/verl-tool/issues/147, https://github.com/huggingface/trl/issues/5904. What tells the
number is the grid of patches (``image_grid_thw``), or ranges of placeholders as vLLM has them (``mm_placeholders``).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from rollout_inspector.diagnose.context import DiagnosisContext, special_in
from rollout_inspector.diagnose.finding import Fault
from rollout_inspector.streams.interfaces import Codec
from rollout_inspector.streams.snippets import counted
from rollout_inspector.streams.token_origins import mask_runs
from rollout_inspector.streams.trajectory import Ids

MERGE = 2
"""Patches on a side that become one vector, where the source names no ``merge_size``: so do Qwen-VL, GLM-V, Kimi-VL."""
MAX_FIELDS = 500  # Fields of a source that are searched for grids and ranges.


@dataclass(frozen=True)
class MediaFamily:
    """The control tokens around one kind of media of a model family."""

    medium: str  # ``image``, ``video`` or ``audio``; the name of its grids and ranges.
    pads: tuple[str, ...]  # The placeholder, and the separators that stand between placeholders.
    opens: str = ""  # What stands right before the placeholders; empty = nothing.
    ends: str = ""
    count: int = 0  # Placeholders of each image; 0 = as many as its size makes.


FAMILIES = (
    MediaFamily("image", ("<|image_pad|>",), "<|vision_start|>", "<|vision_end|>"),  # Qwen2-VL to Qwen3-VL
    MediaFamily("video", ("<|video_pad|>",), "<|vision_start|>", "<|vision_end|>"),
    MediaFamily("image", ("<|IMAGE|>",), "<|vision_bos|>", "<|vision_eos|>"),  # Qwen2.5-Omni
    MediaFamily("image", ("<image_soft_token>",), "<start_of_image>", "<end_of_image>", 256),  # Gemma 3, 3n
    MediaFamily("image", ("<|image|>",), "<|image>", "<image|>"),  # Gemma 4
    MediaFamily("audio", ("<|audio|>",), "<|audio>", "<audio|>"),
    MediaFamily("image", ("<|image|>",), "<|begin_of_image|>", "<|end_of_image|>"),  # GLM-V
    MediaFamily(  # Llama 4
        "image", ("<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>"), "<|image_start|>",
        "<|image_end|>",
    ),
    MediaFamily("image", ("[IMG]", "[IMG_BREAK]"), "", "[IMG_END]"),  # Pixtral, Mistral
    MediaFamily("image", ("<IMG_CONTEXT>",), "<img>", "</img>"),  # InternVL
    MediaFamily("image", ("<|media_pad|>",), "<|media_content|>", "<|media_end|>"),  # Kimi-VL, Kimi K2.5
    MediaFamily("image", ("<image>",)),  # LLaVA
)
"""Sources: the chat templates of Qwen2.5-VL, Qwen3-VL, Qwen2.5-Omni, Kimi-VL and Kimi K2.5; of ``transformers``
``models/*/processing_*.py`` for Gemma 3, 3n and 4, GLM-4V, Llama 4, Pixtral and LLaVA; ``chat`` of InternVL's model."""


def check_media(case: DiagnosisContext, ids: Ids, *sources: Mapping[str, Any]) -> Fault | None:
    """Check the placeholders of ids ``[T]``; the first fault, because what stands behind it is of no use. ``sources``:
    what may hold grids and ranges of these ids. Where media stand in them or a source names some, ``media_lacks`` of
    the case gets what the source lacks to decide how many placeholders are right; empty = decided."""
    codec = case.codec
    fields = dict(_media_fields(sources))
    families = _families(codec) if codec is not None else ()
    here = families if len(ids) and special_in(ids, codec, _media_ids(codec)).any() else ()  # most rows hold no media
    pads = ((family, tokens, [tokens[pad] for pad in family.pads if pad in tokens]) for family, tokens in here)
    media = [(family, tokens, runs) for family, tokens, own in pads if (runs := mask_runs(np.isin(ids, own)))]
    media_here = {family.medium for family, *_ in media}
    absent = [name for name in ("image", "video") if f"{name}_grid" in fields and name not in media_here]
    cut = next((f for f, tokens in here if f.opens and ids[-1] == tokens[f.opens]), None)
    if not media and not fields and cut is None:
        return None
    fault = next(_faults(ids, media, families, fields), None)
    if fault is None and cut is not None:
        sentence = f"The ids end behind {cut.opens}, before the placeholders of the {cut.medium}."
        fault = _fault(len(ids) - 1, len(ids), sentence)
    if fault is None and (name := next((name for name in absent if any(f.medium == name for f, _ in families)), "")):
        sentence = f"No placeholder of {name} stands here, and the grid is of {len(fields[f'{name}_grid'])}."
        fault = _fault(len(ids), len(ids), sentence)
    lacks = "tokenizer" if codec is None else "placeholders in the vocabulary" if absent or not families else ""
    for family, _, runs in media:
        is_expanded = any(stop - start > 1 for start, stop in runs)
        if not is_expanded or not (family.count or f"{family.medium}_grid" in fields or family.medium in fields):
            lacks = f"number of {family.medium} tokens"
    case.media_lacks.append(lacks)
    return fault


def _faults(
    ids: Ids, media: list[tuple[MediaFamily, dict[str, int], list[tuple[int, int]]]],
    families: tuple[tuple[MediaFamily, dict[str, int]], ...], fields: Mapping[str, list[list[int]]],
) -> Iterator[Fault]:
    media_ids = [token for _, tokens in families for token in tokens.values()]
    for family, tokens, runs in media:
        medium, pad = family.medium, family.pads[0]
        grid = fields.get(f"{medium}_grid")
        expected = [prod(sizes) // fields.get("merge", [[MERGE]])[0][0] ** 2 for sizes in grid or ()]
        for index, (start, stop) in enumerate(runs):
            n = int(np.count_nonzero(ids[start:stop] == tokens[pad]))
            of = f" of {expected[index]}" if index < len(expected) and medium == "image" else ""
            here = f"{n:,}{of} {pad} stand at offset {start}"
            if family.ends and (stop == len(ids) or ids[stop] != tokens[family.ends]):
                where = "the ids end there" if stop == len(ids) else "other tokens follow"
                yield _fault(start, stop, f"{here}, and {where}: {family.ends} is missing, so the {medium} is cut.")
            if family.opens and (not start or ids[start - 1] != tokens[family.opens]):
                yield _fault(start, stop, f"{here} without {family.opens} before them, so the {medium} is cut.")
            if family.count and n not in (1, family.count):
                yield _fault(start, stop, f"{here}; each {medium} of this family has {family.count}.")
        counts = [int(np.count_nonzero(ids[start:stop] == tokens[pad])) for start, stop in runs]
        if grid is None or max(counts) <= 1:
            continue  # one placeholder for each image: not expanded yet
        if medium == "image" and len(runs) != len(grid):
            yield _fault(*runs[-1], f"{counted(len(runs), medium)} stand here, and the grid is of {len(grid)}.")
        elif medium == "image":
            for (start, stop), n, right in zip(runs, counts, expected, strict=True):
                if n != right:
                    yield _fault(start, stop, f"{n:,} {pad} stand at offset {start}, and {medium}_grid says {right:,}.")
        elif sum(counts) != sum(expected):
            yield _fault(*runs[-1], f"{sum(counts):,} {pad} stand here, and {medium}_grid says {sum(expected):,}.")
    for medium in ("image", "video", "audio"):
        for offset, length in fields.get(medium, ()):
            stretch = ids[offset : offset + length]
            what = f"The placeholders of {medium} are said to stand at [{offset}, {offset + length})"
            if len(stretch) < length:
                yield _fault(min(offset, len(ids)), len(ids), f"{what}, and there are {len(ids)} ids.")
            elif media_ids and not np.isin(stretch, media_ids).all():
                yield _fault(offset, offset + length, f"{what}, and other tokens stand there.")


def _fault(start: int, stop: int, sentence: str) -> Fault:
    return Fault("media_tokens_wrong", sentence, start, stop)


@lru_cache(maxsize=16)
def _families(codec: Codec) -> tuple[tuple[MediaFamily, dict[str, int]], ...]:
    """The families whose placeholder and edges are control tokens of the vocabulary, with the ids of their tokens."""
    special = np.fromiter(sorted(codec.special_ids), np.int32)
    texts = (piece.decode(errors="replace") for piece in codec.token_bytes(special))
    ids = dict(zip(texts, special.tolist(), strict=True))
    return tuple(
        (family, {text: ids[text] for text in (*family.pads, family.opens, family.ends) if text in ids})
        for family in FAMILIES
        if all(text in ids for text in (family.pads[0], family.opens, family.ends) if text)
    )


@lru_cache(maxsize=16)
def _media_ids(codec: Codec | None) -> frozenset[int]:
    """The ids of all tokens of the families of a vocabulary."""
    return frozenset(token for _, tokens in (_families(codec) if codec else ()) for token in tokens.values())


def _media_fields(sources: tuple[Mapping[str, Any], ...]) -> Iterator[tuple[str, list[list[int]]]]:
    """``image_grid`` and ``video_grid``: sizes of each; ``image``, ``video``, ``audio``: offset and length of each
    range; ``merge``: patches on a side of a vector."""
    stack: list[tuple[str, Any]] = [("", source) for source in sources]
    for _ in range(MAX_FIELDS):
        if not stack:
            return
        name, value = stack.pop()
        if isinstance(value, Mapping):
            if isinstance(value.get("offset"), int) and isinstance(value.get("length"), int):
                value = [value]
            else:
                stack += [(name if key == "data" else str(key), item) for key, item in [*value.items()][:MAX_FIELDS]]
                continue
        if name in ("merge_size", "spatial_merge_size") and type(value) is int and value > 0:
            yield "merge", [[value]]
        elif isinstance(value, list) and value:
            if name in ("image_grid_thw", "image_grid_hws", "video_grid_thw") and all(map(_is_sizes, value)):
                yield f"{name[:5]}_grid", value
            elif name in ("image", "video", "audio") and all(
                isinstance(place, Mapping) and _is_sizes([place.get("length")]) and type(place.get("offset")) is int
                and place["offset"] >= 0 for place in value
            ):
                yield name, [[place["offset"], place["length"]] for place in value]
            elif len(value) == 1:
                stack.append((name, value[0]))


def recorded_media(*sources: Mapping[str, Any]) -> tuple[list[int], list[list[int]]]:
    """The placeholders of each grid that sources name, and offset and length of each range."""
    fields = dict(_media_fields(sources))
    merge = fields.get("merge", [[MERGE]])[0][0]
    sizes = [size for medium in ("image", "video") for size in fields.get(f"{medium}_grid", ())]
    return [prod(size) // merge**2 for size in sizes], [
        place for medium in ("image", "video", "audio") for place in fields.get(medium, ())
    ]


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= 3 and all(type(n) is int and n > 0 for n in value)
