"""The components of a circuit that is drawn: their order from bottom to top, and which of them belong together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from gatelens.model.components import Component
from gatelens.model.graph import Graph

Edge = tuple[int, int]  # the numbers of a source and a destination
RoleNode = tuple[int, str]  # the number of a role, and a component at the positions of this role
STAGGER = {"KV": -0.3, "H": 0.0, "M": 0.3}  # height of each kind of component inside the band of its layer


def component_name(end: str) -> str:
    """The component that a source or a destination belongs to: ``L3H7`` for ``L3H7.q``."""
    return end.partition(".")[0]


def edge_ends(graph: Graph, edge: Edge) -> tuple[str, str]:
    """The names of the components that an edge connects."""
    source, destination = edge
    return graph.source_names[source], component_name(graph.destination_names[destination])


def connected_components(graph: Graph, edges: Iterable[Edge]) -> list[str]:
    """The names of the components that these edges connect, from bottom to top and by their number inside a layer."""

    def order(name: str) -> tuple[float, int]:
        component = Component.find(name)
        if component is None:
            return (-1, 0) if name == "embed" else (graph.n_layers, 0)
        return component.layer + STAGGER[component.kind], component.index

    return sorted({name for edge in edges for name in edge_ends(graph, edge)}, key=order)


def links(graph: Graph, names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of a KV head and a head that it serves, among these components. They are connected without an edge."""
    group_size, present = graph.n_heads // graph.n_kv_heads, set(names)
    pairs: list[tuple[str, str]] = []
    for name in names:
        component = Component.find(name)
        if component is not None and component.kind == "KV":
            first = component.index * group_size
            heads = (str(Component(component.layer, "H", head)) for head in range(first, first + group_size))
            pairs += [(name, head) for head in heads if head in present]
    return pairs


def attention_moves(
    graph: Graph, sees: Tensor, nodes: set[RoleNode], sources: set[RoleNode]
) -> list[tuple[RoleNode, RoleNode]]:
    """What attention moves between roles: from where k or v edges enter at one role to a head that writes at another.

    Arguments:
        sees: bool (role, other role), whether the other role is visible to the role.
        nodes: the components of a circuit of edges by role.
        sources: those that edges leave.
    """
    shared = graph.n_heads != graph.n_kv_heads
    names = sorted({name for _, name in nodes})
    pairs = links(graph, names) if shared else [(name, name) for name in names if _is_head(name)]
    roles = sorted({role for role, _ in nodes})
    return [
        ((role, reader), (other, head))
        for reader, head in pairs
        for role in roles
        for other in roles
        if (role, reader) in nodes
        and (other, head) in sources
        and bool(sees[other, role])
        and (shared or role != other)
    ]


def _is_head(name: str) -> bool:
    component = Component.find(name)
    return component is not None and component.kind == "H"
