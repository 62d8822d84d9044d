"""Draws mutants: small faults in the functions of a package, made by cosmic-ray."""

from __future__ import annotations

import ast
import inspect
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from cosmic_ray.ast import Visitor, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

ROOT = Path(__file__).parents[2]
OPERATORS = [
    *(f"ReplaceBinaryOperator_{pair}" for pair in ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul")),
    *(f"ReplaceBinaryOperator_{pair}" for pair in ("Mod_Mul", "Pow_Mul", "BitAnd_BitOr", "BitOr_BitAnd")),
    *(f"ReplaceComparisonOperator_{pair}" for pair in ("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")),
    *(f"ReplaceComparisonOperator_{pair}" for pair in ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Lt_GtE", "Gt_LtE")),
    *(f"ReplaceUnaryOperator_Delete_{name}" for name in ("USub", "Invert", "Not")),
    *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ZeroIterationForLoop"),
    *("ExceptionReplacer", "NumberReplacer"),
]
_DISPLAY = {"__repr__", "__str__", "_repr_html_"}


@dataclass(frozen=True)
class Mutant:
    """One fault: the occurrence of an operator in a module, and the function whose code it changes."""

    package: str
    module: str
    operator: str
    occurrence: int
    line: int
    function: str
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.module}:{self.operator}:{self.occurrence}"


def mutated_source(mutant: Mutant) -> str:
    """The text of the module with the fault."""
    source = (ROOT / mutant.module).read_text()
    return str(mutate_code(source, get_operator(f"core/{mutant.operator}")(), mutant.occurrence))


def functions(code: CodeType) -> Iterator[CodeType]:
    """The functions of a module and the methods of its classes, but not the functions inside them."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & inspect.CO_OPTIMIZED:
                yield constant
            else:
                yield from functions(constant)


def without_positions(code: CodeType) -> CodeType:
    """The code without columns and line numbers, so that only a change of behaviour makes two codes differ."""
    constants = [without_positions(one) if isinstance(one, CodeType) else one for one in code.co_consts]
    return code.replace(co_linetable=b"", co_consts=tuple(constants))


def key(code: CodeType) -> tuple[str, int]:
    """What tells functions of a module apart: the name, and the last line for overloads and setters."""
    return code.co_qualname, max(line for _, _, line in code.co_lines() if line is not None)


def changed_function(path: Path, mutated: str) -> CodeType | None:
    """The new code of the function that the mutant changes; None if it changes no function's code."""
    before = functions(compile(path.read_text(), str(path), "exec"))
    try:
        after = functions(compile(mutated, str(path), "exec"))
    except SyntaxError:  # `**options` became `*options`
        return None
    pairs = zip(before, after, strict=False)
    return next((new for old, new in pairs if without_positions(old) != without_positions(new)), None)


class _Places(Visitor):  # type: ignore[misc]  # cosmic-ray has no types
    """The line of every occurrence of each operator, in the order in which cosmic-ray counts them."""

    def __init__(self) -> None:
        self.operators = {name: get_operator(f"core/{name}")() for name in OPERATORS}
        self.lines: dict[str, list[int]] = {name: [] for name in OPERATORS}

    def visit(self, node: object) -> object:
        for name, operator in self.operators.items():
            self.lines[name] += [start[0] for start, *_ in operator.mutation_positions(node)]
        return node


def _is_estimate(code: CodeType) -> bool:
    """Whether a function estimates memory; such estimates may be too high."""
    return code.co_name.endswith("numbers") and code.co_name != "_sequence_numbers"


def draw(package: str, size: int, seed: int) -> list[Mutant]:
    """A random sample of the mutants of a package."""
    places = []
    for path in sorted((ROOT / package).rglob("*.py")):
        found = _Places()
        found.walk(get_ast(path.read_text()))
        for operator, lines in found.lines.items():
            places += [(path, operator, *place) for place in enumerate(lines)]
    random.Random(seed).shuffle(places)
    mutants: list[Mutant] = []
    for path, operator, occurrence, line in places:
        source = path.read_text()
        raised = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise)]
        if any(node.lineno <= line <= (node.end_lineno or node.lineno) for node in raised):
            continue
        mutated = mutate_code(source, get_operator(f"core/{operator}")(), occurrence)
        code = changed_function(path, mutated)
        if code is not None and code.co_name not in _DISPLAY and not _is_estimate(code):
            lines = zip(source.splitlines(), mutated.splitlines(), strict=False)
            before, after = next(((old.strip(), new.strip()) for old, new in lines if old != new), ("", ""))
            module = str(path.relative_to(ROOT))
            mutants.append(Mutant(package, module, operator, occurrence, line, code.co_qualname, before, after))
        if len(mutants) == size:
            break
    return mutants
