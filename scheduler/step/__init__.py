"""One step: who runs, what the plan says, and what its output means."""
