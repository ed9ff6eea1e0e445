"""Examples with engines, whose processes are forks."""

from tests.integration.forks import forked_engines as forked_engines  # a fixture
