"""How to install an extra of Longshore, for messages."""

from typing import Final

_SCRIPT: Final = "longshore.deploy.__main__:main"


def install_command(extra: str) -> str:
    """A shell command. The distribution has the name that pyproject.toml gives it, which is not
    that of the package: on PyPI, `longshore` is another project. Without an installation, the
    command is for a checkout."""
    from importlib.metadata import entry_points  # takes 20 ms, and only errors need it

    scripts = entry_points(group="console_scripts", name="longshore")
    names = [script.dist.name for script in scripts if script.value == _SCRIPT and script.dist]
    return f"pip install '{names[0] if names else '.'}[{extra}]'"
