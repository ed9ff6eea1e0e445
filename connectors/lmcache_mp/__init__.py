"""KV in the server of LMCache, a process of its own that engines reach by ZMQ (its "multi-process
mode"). Blocks are copied through the server's shared memory, on CPU and CUDA. LMCache itself is not
imported, so it need not be installed here.
"""
