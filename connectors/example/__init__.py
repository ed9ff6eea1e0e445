"""The example connector: every full block in a file of its own, for authors of connectors to read.

`--kv-connector example --kv-connector-config '{"path": "/var/tmp/kv"}'`. Blocks are found again
after a restart. Nothing is ever deleted; the `offloading` connector has a disk tier with a limit.
"""
