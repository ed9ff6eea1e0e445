"""The settings are now in `longshore.deploy.settings.options`."""

from longshore.protocol.moved import moved_names

__getattr__ = moved_names(__name__)
