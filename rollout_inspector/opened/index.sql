PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS file (
  id INTEGER PRIMARY KEY, path TEXT UNIQUE, size INTEGER, changed INTEGER, format TEXT DEFAULT '',
  way TEXT DEFAULT '',              -- how it is read: by lines, by sessions, or whole; empty = it was not looked at
  is_document INTEGER DEFAULT 0, reach INTEGER DEFAULT 0, line INTEGER DEFAULT 1, tail BLOB DEFAULT x'',
  is_done INTEGER DEFAULT 0, problem TEXT DEFAULT '');
CREATE TABLE IF NOT EXISTS trajectory (
  id INTEGER PRIMARY KEY,           -- the number of a part of a file, and in the lower 32 bits the place in it
  file INTEGER, at TEXT, state INTEGER DEFAULT 0, name TEXT UNIQUE, line INTEGER, problem TEXT, reward REAL,
  prompt_group TEXT, training_step INTEGER, stop_reason TEXT, error TEXT, n_steps INTEGER, n_rows INTEGER,
  n_tokens INTEGER, n_sampled INTEGER, n_trained INTEGER,
  own TEXT,                         -- its id in the file, where its name is another one
  findings BLOB, checks TEXT);
CREATE TABLE IF NOT EXISTS checked (  -- what the processes that check all found, until it is taken over
  path TEXT, changed INTEGER, start INTEGER, n INTEGER, name TEXT, findings BLOB, checks TEXT,
  PRIMARY KEY (path, changed, start, n));
CREATE INDEX IF NOT EXISTS of_file ON trajectory (file, id);
CREATE INDEX IF NOT EXISTS unread ON trajectory (id) WHERE state = 0;
