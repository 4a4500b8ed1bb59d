"""Elastic Fabric Adapters: which AWS machine types have them, and how a machine must be started to get all of them.

The numbers are those of EC2's DescribeInstanceTypes (`NetworkInfo`: network cards, `EfaInfo`), which the tests hold
them against, and of https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-eni.html#network-cards. Where the
interfaces go: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html for machines with several
network cards, https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/create-efa.html for those with one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# interface: IP alone. efa: IP and EFA. efa-only: no IP, and so no address of the subnet.
Kind = Literal["interface", "efa", "efa-only"]


@dataclass(frozen=True)
class Interface:
    """A network interface. device: its index on its card; the primary interface is device 0 of card 0."""

    card: int
    device: int
    kind: Kind


@dataclass(frozen=True)
class Cards:
    """A machine type's network cards. first: the first of those that can have an EFA; all after it can."""

    count: int
    first: int = 0

    @property
    def efas(self) -> int:
        """At most one a card."""
        return self.count - self.first


PRIMARY = Interface(0, 0, "interface")

TABLE: dict[str, Cards] = {
    "p3dn.24xlarge": Cards(1),
    "p4d.24xlarge": Cards(4),
    "p4de.24xlarge": Cards(4),
    "p5.4xlarge": Cards(1),
    "p5.48xlarge": Cards(32),
    "p5e.48xlarge": Cards(32),
    "p5en.48xlarge": Cards(16),
    "p6-b200.48xlarge": Cards(8),
    "p6-b300.48xlarge": Cards(17, first=1),
    "g4dn.8xlarge": Cards(1),
    "g4dn.12xlarge": Cards(1),
    "g4dn.16xlarge": Cards(1),
    "g4dn.metal": Cards(1),
    "g5.8xlarge": Cards(1),
    "g5.12xlarge": Cards(1),
    "g5.16xlarge": Cards(1),
    "g5.24xlarge": Cards(1),
    "g5.48xlarge": Cards(1),
    "g6.8xlarge": Cards(1),
    "g6.12xlarge": Cards(1),
    "g6.16xlarge": Cards(1),
    "g6.24xlarge": Cards(1),
    "g6.48xlarge": Cards(1),
    "gr6.8xlarge": Cards(1),
    "g6e.8xlarge": Cards(1),
    "g6e.12xlarge": Cards(1),
    "g6e.16xlarge": Cards(1),
    "g6e.24xlarge": Cards(2),
    "g6e.48xlarge": Cards(4),
    "g7e.8xlarge": Cards(1),
    "g7e.12xlarge": Cards(1),
    "g7e.24xlarge": Cards(2),
    "g7e.48xlarge": Cards(4),
}


def interfaces(machine: str) -> tuple[Interface, ...]:
    """What a machine of that type starts with to have all its EFAs, and one address. Raises KeyError if it has none.

    With one card, the primary interface is the EFA. With several, as AWS advises: the primary one only has the address,
    and each card that can have one an EFA without, as device 0 but on card 0, where that is the primary interface.
    """
    cards = TABLE[machine]
    if cards.count == 1:
        return (Interface(0, 0, "efa"),)
    fabric = (Interface(card, 1 if card == 0 else 0, "efa-only") for card in range(cards.first, cards.count))
    return (PRIMARY, *fabric)
