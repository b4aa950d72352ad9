"""The arithmetic of token streams. Needs numpy and the standard library only."""
