"""The transport of `p2p_nccl`: reads between two ranks by NCCL, and by gloo on CPUs.

NCCL has no one-sided reads: for what one rank receives, the other one must send the same number of
bytes at the same moment. So each reader rank has a link to each owner rank from which it reads. A
link has a communicator of these two ranks, a thread at both ends, and a side channel between them
(`channel.py`). The reader asks for a chunk; the owner's end gathers its runs of bytes in staging
memory and sends it, and the reader's end receives it in staging memory and scatters it.

Only these copies touch KV blocks, each for a moment. A link that has ended copies nothing any more,
even while its thread still waits in the library, so it can be ended at any moment.
"""
