"""The components of a model and their names: ``embed``, ``L3H7``, ``L3KV2``, ``M3`` and ``logits``.

This is the only place that reads such a name; `gatelens.model.graph` lists all names of a model in order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from gatelens.errors import GatelensError

_NAME = re.compile(r"L(\d+)(H|KV)(\d+)|M(\d+)", re.ASCII)


@dataclass(frozen=True, order=True)
class Head:
    """One attention head, written ``L3H7``: layer 3, head 7, both counted from 0.

    Heads sort by layer, then by their number in the layer.

    Example:
        head = gatelens.Head.parse("L9H6")
        head.layer, head.index, str(head)  # 9, 6, "L9H6"
    """

    layer: int  # the layer, from 0
    index: int  # the number of the head in its layer, from 0

    @classmethod
    def parse(cls, name: str) -> Head:
        """Read a head's name.

        Arguments:
            name: a name such as ``L3H7``.

        Returns:
            The head. A name of any other form raises a `GatelensError`.

        Example:
            >>> Head.parse("L3H7")
            Head(layer=3, index=7)
        """
        component = Component.find(name)
        if component is None or component.kind != "H":
            raise GatelensError(f"'{name}' is not the name of a head: write layer 3, head 7 as L3H7.")
        return cls(component.layer, component.index)

    def __str__(self) -> str:
        return f"L{self.layer}H{self.index}"


@dataclass(frozen=True)
class Component:
    """A component inside a layer.

    - ``H``: an attention head, written ``L3H7``;
    - ``KV``: a key-value head that several attention heads share, written ``L3KV2``;
    - ``M``: the MLP of a layer, written ``M3``; its ``index`` is 0.
    """

    layer: int
    kind: Literal["H", "KV", "M"]
    index: int = 0

    @classmethod
    def find(cls, name: str) -> Component | None:
        """Read a component's name.

        Arguments:
            name: a name such as ``L3H7``, ``L3KV2`` or ``M3``.

        Returns:
            The component, or None if the name does not belong to a layer (``embed``, ``logits``, any other text).
        """
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        if match[4] is not None:
            return cls(int(match[4]), "M")
        return cls(int(match[1]), "H" if match[2] == "H" else "KV", int(match[3]))

    def __str__(self) -> str:
        return f"M{self.layer}" if self.kind == "M" else f"L{self.layer}{self.kind}{self.index}"
