"""`python -m purepage.tune`: times configurations and implementations for a user's shapes, and writes the device's record.

`cases` are the shapes, `problem` makes arrays of one, `candidates` are its configurations, `timing` and `roofline` measure. A `worker` is
a child process in which all of that happens (`jobs`), so that a crash costs one row; `runner` asks it and writes the record.
"""
