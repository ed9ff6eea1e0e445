"""`longshore doctor --machine`: checks what this machine has for serving."""
