"""The flight recorder of a scheduler, and the replay of its records."""
