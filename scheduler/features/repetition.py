"""Detects output that repeats itself."""

from longshore.protocol.arrays import Int32Array
from longshore.protocol.sampling import RepetitionDetection


def is_repeating(output_token_ids: Int32Array, detection: RepetitionDetection) -> bool:
    """Whether the last tokens are one pattern of an allowed size, `min_count` times in a row.

    O(sizes x min_count x size) at worst, but a size whose last two tokens differ costs nothing.
    """
    num_tokens = len(output_token_ids)
    last_token = output_token_ids[-1] if num_tokens else -1
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        span = size * detection.min_count
        if span > num_tokens:
            return False
        if output_token_ids[num_tokens - 1 - size] != last_token:
            continue
        tail = output_token_ids[num_tokens - span :]
        if (tail[size:] == tail[:-size]).all():
            return True
    return False
