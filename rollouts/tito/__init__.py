"""The arithmetic of token streams: numpy and the standard library only."""
