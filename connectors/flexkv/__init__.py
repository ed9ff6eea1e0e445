"""KV in FlexKV: host memory, SSD and remote storage. Written from its published interface and
tested with a fake of it: not verified against the library.
"""
