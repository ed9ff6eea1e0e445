"""The multi connector: several connectors in one. It loads from the one with the longest hit and
stores in all.

`--kv-connector multi --kv-connector-config '{"connectors": [{"connector": "example", "options":
{"path": "/var/tmp/kv"}}, {"connector": "package.module:Class"}]}'`
"""
