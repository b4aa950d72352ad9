"""Chat templates that chance has damaged."""

import random


def damaged(text: str, chance: random.Random) -> str:
    """The template with a stretch cut out, doubled, or put elsewhere."""
    a, b = sorted((chance.randrange(len(text)), chance.randrange(len(text))))
    b = min(b, a + chance.choice((1, 3, 20, 200)))
    match chance.randrange(4):
        case 0:
            return text[:a] + text[b:]
        case 1:
            return text[:b] + text[a:]
        case 2:
            return text.replace(chance.choice(("loop", "message", "==", "not ", "endif", "content", "role")), "x", 1)
        case _:
            place = chance.randrange(len(text))
            return text[:place] + text[a:b] + text[place:]
