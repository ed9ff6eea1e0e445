"""What the APIs of all vendors share over HTTP."""
