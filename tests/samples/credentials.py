"""Secrets that no log and no page may hold."""

TOKENS = {
    "a share link": "loBGAzdd8qMHNWAZyuAvhN0X_4iNT7Bb",
    "an API key": "ri_Xq8-Wf0aLk3_mC9vZt7bQeYh2sRu5nPd1gJo6iTx4",
    "a login link": "q1W2e3R4t5Y6u7I8o9P0a1S2d3F4g5H6",
    "a session": "k3j4h5g6f7d8s9a0q1w2e3r4t5y6u7i8",
    "a recorder's token": "Zk3-a_long_token_of_letters",
    "a password": "hunter2-correct-horse",
}


SHARE, API, LOGIN, SESSION, RECORDER, PASSWORD = TOKENS.values()
