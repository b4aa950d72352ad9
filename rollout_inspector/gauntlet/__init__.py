"""The gauntlet: fifteen properties of a gateway that captures tokens, decided by driving it. ``engine`` is a scripted
server behind the gateway, ``harness`` a scripted client before it, ``play`` what the client asks. ``captured`` reads
what the gateway wrote, ``properties`` compares the three and writes the verdicts."""
