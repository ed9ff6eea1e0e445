"""Waiting requests, and the policies that order them."""
