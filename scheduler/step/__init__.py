"""One step: choosing requests, building the plan, and applying its output."""
