"""A gateway whose engine is scripted."""

from tests.deploy.gateway.conftest import start_gateway

__all__ = ["start_gateway"]
