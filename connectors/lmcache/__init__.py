"""The lmcache connector: KV blocks in LMCache's storage, which is host memory, files and Redis.

`--kv-connector lmcache --kv-connector-config '{"cpu_bytes_to_use": "8GiB"}'`. Each worker has a
StorageManager of LMCache (`storage.py`), without its engine adapters. Keys are Longshore's block
hashes, so they are the same in every process that has the same hash seed.
"""
