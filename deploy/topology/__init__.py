"""Deployments on several nodes: the topology file, what runs on each node, and its keys."""
