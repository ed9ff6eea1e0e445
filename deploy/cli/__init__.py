"""The `longshore` command: its settings, its subcommands and what they print."""
