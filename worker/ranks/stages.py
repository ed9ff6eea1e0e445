"""The layers of each pipeline stage. Does not import torch, so that a model that cannot be divided
is refused before a process starts."""


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """Earlier stages take the remainder. Raises ValueError if a stage would be empty."""
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers cannot be cut into {num_stages} stages")
    part, rest = divmod(num_layers, num_stages)
    first = stage * part + min(stage, rest)
    return range(first, first + part + (stage < rest))
