"""The decode_bench connector: dummy KV in place of prompts, to measure decoding without prefill.

`--kv-connector decode_bench`. The KV of all tokens of a prompt but the last is filled with dummy
values, so a request begins to decode at once, with the memory and the memory traffic of its whole
context. Its tokens have no meaning, but each request's tokens depend only on the request, the
options and the number of ranks.
"""
