"""Head roles over several runs, as the paper on head gating reports them, beside its published values.

- *shares*: how many heads have a score of 0.5 or more: mean over seeds, in all seeds, in any seed;
- *distribution* of the scores of each kind;
- *correlations* of scores between seeds, between tasks of one model, and between models of one shape;
- *overlap* of the heads of each kind between models of one shape, such as a dense and a sparse one;
- *mediation*: the facilitation of heads that other scores mark (`gatelens.measures.mediation`).

The paper is Nam et al., "Causal Head Gating", arXiv 2505.13737.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gatelens.errors import GatelensError
from gatelens.gates.roles import KINDS, HeadRoles
from gatelens.measures.mediation import PatchingComparison, compare_runs, difference
from gatelens.measures.role_statistics import (
    Correlation,
    Mediation,
    Overlap,
    Share,
    between_runs,
    between_seeds,
    overlaps,
    run_name,
    share_of_kind,
)
from gatelens.measures.roles_result import RolesResult, load_roles
from gatelens.runtime.files import make_folder, read_json, write_csv, write_json
from gatelens.runtime.records import SCHEMA_VERSION, Record, write_lines
from gatelens.runtime.run_folder import ASKED, RESULT


class RoleSummaryRecord(Record):
    """The schema of ``roles-summary.json``."""

    shares: list[Share]
    correlations: list[Correlation]
    overlaps: list[Overlap]
    mediation: list[Mediation]


@dataclass(frozen=True, eq=False)
class RoleSummary:
    """What several runs of head roles say together.

    Arguments:
        results: the runs.
        mediation: comparisons with other scores, each with the name of its model and task.
        problems: comparisons that could not be made, one sentence each.

    Example:
        summary = gatelens.summarise_runs(["runs/roles", "runs/ioi"])
        summary.shares
    """

    results: list[RolesResult]
    shares: list[Share]  # how many heads are of each kind
    correlations: list[Correlation]  # of the scores between seeds, tasks or models
    overlaps: list[Overlap]  # heads that are of a kind in two models
    mediation: list[tuple[str, PatchingComparison]]
    problems: list[str]

    def grid(self) -> dict[str, dict[str, HeadRoles]]:
        """The roles by task and by model, for figures. Of several runs of a model and task, the last counts."""
        grid: dict[str, dict[str, HeadRoles]] = {}
        for result in self.results:
            grid.setdefault(result.task, {})[result.model] = result.roles
        return grid

    def save(self, folder: str | Path) -> None:
        """Write ``roles-summary.json`` and a CSV file of each table."""
        folder = Path(folder)
        make_folder(folder)
        record = RoleSummaryRecord(
            schema_version=SCHEMA_VERSION,
            shares=self.shares,
            correlations=self.correlations,
            overlaps=self.overlaps,
            mediation=[Mediation.of(name, comparison) for name, comparison in self.mediation],
        )
        write_json(folder / "roles-summary.json", record.model_dump(mode="json"))
        shares = [share.flat() for share in self.shares]
        write_csv(folder / "shares.csv", [*shares[0]], ([*line.values()] for line in shares))
        write_lines(folder / "correlations.csv", Correlation, self.correlations)
        write_lines(folder / "overlaps.csv", Overlap, self.overlaps)
        write_lines(folder / "mediation.csv", Mediation, record.mediation)


def summarise_runs(folders: Sequence[str | Path], above: float = 3.0) -> RoleSummary:
    """Summarise all finished runs of head roles in these folders and below them.

    Runs of circuits of the same model and task are compared with them.

    Arguments:
        folders: run folders, or folders that contain them, such as that of a study.
        above: heads whose score is this many standard deviations above the mean are marked.

    Example:
        summary = gatelens.summarise_runs(["runs/roles", "runs/ioi"])
        summary.save("runs/roles-summary")
    """
    runs = sorted({path.parent for folder in folders for path in Path(folder).rglob(ASKED)})
    finished = [run for run in runs if (run / RESULT).exists()]
    asked = {run: read_json(run / ASKED) for run in finished}
    gates = [run for run in finished if asked[run].get("kind") == "gate"]
    circuits = [run for run in finished if asked[run].get("kind") == "circuit"]
    if not gates:
        places = ", ".join(map(str, folders))
        raise GatelensError(
            f"there is no finished run of head roles in {places}: `gatelens gate MODEL TASK` makes one."
        )
    results = [load_roles(run) for run in gates]
    mediation: list[tuple[str, PatchingComparison]] = []
    problems: list[str] = []
    for (run, result), circuit in itertools.product(zip(gates, results, strict=True), circuits):
        if not difference(asked[run], asked[circuit]):
            try:
                comparison = compare_runs(run, circuit, above=above, over="max")
                mediation.append((run_name(result), comparison))
            except GatelensError as error:
                problems.append(f"{run} and {circuit} are not compared: {error}")
    return summarise(results, mediation, problems)


def summarise(
    results: Sequence[RolesResult],
    mediation: Sequence[tuple[str, PatchingComparison]] = (),
    problems: Sequence[str] = (),
) -> RoleSummary:
    """Summarise runs of head roles.

    Arguments:
        results: runs of any models and tasks.
        mediation: comparisons with other scores, each with a name.
        problems: comparisons that could not be made.
    """
    shares = [share_of_kind(result, kind) for result in results for kind in KINDS]
    correlations = [*between_seeds(results), *between_runs(results)]
    return RoleSummary(list(results), shares, correlations, list(overlaps(results)), list(mediation), list(problems))
