"""Both halves of connectors to stores that find KV by the tokens of a whole prefix: LMCache's
server and FlexKV. A connector adds a `PrefixStore`, the client of its library.
"""
