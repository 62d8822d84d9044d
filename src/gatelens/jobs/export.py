"""Write the circuit of a saved run for other programs: EAP-IG, the MIB circuit track, circuit-tracer, Neuronpedia."""

from __future__ import annotations

import re
from pathlib import Path

from jaxtyping import Bool, Int
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.level import top_masks
from gatelens.gates.selection import selected
from gatelens.measures.attribution_graph import write_attribution_graph
from gatelens.measures.circuit_result import CircuitRecord, load_circuit
from gatelens.measures.example import load_prompts
from gatelens.measures.exchange import read_graph, write_graph
from gatelens.model.graph import Graph
from gatelens.runtime.files import make_folder, read_json
from gatelens.runtime.records import read_record
from gatelens.runtime.run_folder import RESULT


def export_circuit(run: str | Path, out: str | Path, k: int | None = None) -> Path:
    """Write the edge circuit of a saved run in the format of another program.

    Example:
        export_circuit("runs/ioi-edges", "ioi.pt")         # scores and circuit for EAP-IG and MIB
        export_circuit("runs/ioi-edges", "graphs", k=200)  # the best 200 edges for circuit-tracer's viewer

    Arguments:
        run: the folder of a run of ``gatelens circuit --level edges``.
        out: a file that ends in ``.json`` or ``.pt`` for EAP-IG and MIB, or a folder for circuit-tracer's viewer.
        k: how many edges the circuit keeps, by the run's ranking; None: the circuit at the run's threshold.

    Returns:
        The path of the file that was written.
    """
    run, out = Path(run), Path(out)
    record = read_record(run / RESULT, CircuitRecord)
    if record.graph is None or not (run / "circuit.json").exists():
        raise GatelensError(
            f"{run} has no edge circuit that reaches its threshold: `gatelens circuit MODEL TASK --level edges` makes "
            "such a run."
        )
    graph = record.graph.graph()
    scores, kept = read_graph(run / "circuit.json", graph)
    if k is not None:
        settings = record.settings
        [order] = selected(load_circuit(run, scores=True).scores[0], settings.ranking, settings.selection)
        kept = graph.on_a_path(_top(order, k, graph))[0]
    if out.suffix in (".json", ".pt"):
        make_folder(out.parent)
        write_graph(out, scores, kept, int(read_json(run / "circuit.json")["cfg"]["d_model"]))
        return out
    prompts = load_prompts(run)
    if not prompts:
        raise GatelensError(f"{run} has no example prompt, which the graph shows: run the job again.")
    slug = re.sub(r"[^A-Za-z0-9]+", "-", run.resolve().name).strip("-") or "circuit"
    return write_attribution_graph(out, slug, record.model, scores, kept, prompts[0])


def _top(order: Int[Tensor, " edge"], k: int, graph: Graph) -> Bool[Tensor, "1 source destination"]:
    if k < 1:
        raise GatelensError(f"k is {k}: a circuit keeps at least 1 edge.")
    return top_masks(order, [k], graph.edges.numel(), complement=False).view(1, *graph.edges.shape)
