"""Starts, monitors and stops the processes of a deployment."""
