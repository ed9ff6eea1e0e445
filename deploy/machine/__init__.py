"""`longshore doctor --machine`: what this machine has for serving, and what would help."""
