"""What the halves of the connector tell each other."""

import msgspec


class SlotRow(msgspec.Struct, frozen=True, array_like=True):
    """The output of `row` is saved to a slot, or loaded from it. key: in a save that is offered to
    other engines; else empty."""

    row: int
    slot: int
    num_tokens: int
    key: str = ""


class SlotPull(msgspec.Struct, frozen=True, array_like=True):
    """Fill a slot with an output that another engine has."""

    key: str
    slot: int
    num_tokens: int


class Commands(msgspec.Struct, frozen=True, array_like=True):
    """Metadata of a plan. withdrawn: keys that rank 0 offers to no other reader from now on."""

    saves: list[SlotRow] = []
    loads: list[SlotRow] = []
    pulls: list[SlotPull] = []
    withdrawn: list[str] = []


class Report(msgspec.Struct, frozen=True, array_like=True):
    """Metadata of a report of one rank.

    pulled, failed: keys whose pull has ended. A failed one writes to its slot no more.
    free_slots: of withdrawn outputs that no reader reads any more.
    """

    pulled: list[str] = []
    failed: list[str] = []
    free_slots: list[int] = []
