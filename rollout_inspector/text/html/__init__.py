"""HTML from model output, which is hostile text: all of it is escaped."""
