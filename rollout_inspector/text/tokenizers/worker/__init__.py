"""Runs in a limited process: the only code that parses a tokenizer's files and encodes with it."""
