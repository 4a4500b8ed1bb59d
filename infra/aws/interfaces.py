"""Which network interfaces a machine starts with. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spotrun.spec import machine_types

# interface: IP only. efa: IP and EFA. efa-only: no IP, so no address of the subnet.
Kind = Literal["interface", "efa", "efa-only"]


@dataclass(frozen=True)
class Interface:
    """A network interface of a launch template."""

    card: int  # the index of its network card
    device: int  # Its index on the card. The primary interface is device 0 of card 0.
    kind: Kind  # what it is for


PRIMARY = Interface(0, 0, "interface")


def with_efas(machine: str) -> tuple[Interface, ...]:
    """The interfaces that give a machine all its EFAs, and one address. Raises KeyError if the type has no EFA.

    With one card, the primary interface is the EFA. With several cards, as AWS advises, the primary interface only has
    the address. Each card that can have an EFA gets one without an address: as device 1 on card 0, where the primary
    interface is device 0, and as device 0 on the other cards.
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html (several cards)
    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/create-efa.html (one card)
    """
    found = machine_types.AWS[machine]
    if not found.cards:
        raise KeyError(machine)
    if found.cards == 1:
        return (Interface(0, 0, "efa"),)
    fabric = (Interface(card, 1 if card == 0 else 0, "efa-only") for card in range(found.first_efa, found.cards))
    return (PRIMARY, *fabric)
