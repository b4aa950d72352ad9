"""A measurement of the diagnosis on faults whose places are known. Its author had not read the rules."""
