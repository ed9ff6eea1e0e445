"""Structured output: the grammar process, and the scheduler's end of it."""
