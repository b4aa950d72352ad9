"""Opaque codes, by which addresses name what is stored."""

import secrets

ALPHABET = "23456789abcdefghjkmnpqrstuvwxyz"


def new_code() -> str:
    """An opaque code for URLs: 12 characters without look-alikes, about 59 bits."""
    return code_of_number(secrets.randbelow(len(ALPHABET) ** 12))


def code_of_number(n: int) -> str:
    """The code of a number, 12 characters long; the number's digits beyond these are left out."""
    return "".join(ALPHABET[n // len(ALPHABET) ** k % len(ALPHABET)] for k in range(12))
