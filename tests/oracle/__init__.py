"""The textbook scheduler: the rules in their plainest form, for others to be compared with."""
