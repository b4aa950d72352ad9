"""The commands of `manage.py`, and what they share."""


def one_line(text: str) -> str:
    """Foreign text for a terminal: line breaks, escape sequences and invisible characters are written out."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
