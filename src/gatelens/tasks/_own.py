"""One's own task: a JSON-lines file with `clean`, `corrupt`, `answer`, `wrong`, or with `prompt`, `response`.

`answer` and `wrong` are strings or lists of strings, each one token that follows the prompt (most begin with a space).
Every line is checked, and a bad one is reported with its number.
"""

import json
import logging
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any, TypeVar

from gatelens.errors import GatelensError
from gatelens.tasks.base import CircuitTask, ResponseTask, examples, from_tokens
from gatelens.tasks.tokens import Pair, Tokenizer, tokenise

CIRCUIT_KEYS = ("clean", "corrupt", "answer", "wrong")
RESPONSE_KEYS = ("prompt", "response")
# So many bad lines are shown in an error; the rest is counted.
SHOWN = 10

Item = TypeVar("Item")
Row = TypeVar("Row", bound=Sized)
log = logging.getLogger(__name__)


def read(
    tokenizer: Tokenizer,
    path: str,
    n: int | None = None,
    seed: int = 0,
    *,
    skip_bad: bool = False,
    context: int | None = None,
) -> CircuitTask | ResponseTask:
    """The task in the file: all its good lines in their order, at most the first n; `seed` changes nothing.

    A bad line is an error, unless `skip_bad`: then the good lines are used and a warning says how many were not.
    context: how many tokens the model reads; a longer line is a bad one.
    """
    lines = _lines(path)
    if not lines:
        raise GatelensError(f"{path} has no lines: write one JSON object a line with {_keys()}.")
    if _is_response(lines):
        _, rows = _good(path, lines, _item, lambda items: examples(tokenizer, items), skip_bad, n, context)
        return ResponseTask(path, seed, rows, tokenizer.pad_token_id or 0, {"skip_bad": skip_bad})
    pairs, tokens = _good(path, lines, _pair, lambda items: tokenise(tokenizer, items), skip_bad, n, context)
    return from_tokens(path, seed, pairs, tokens, skip_bad=skip_bad)


def _lines(path: str) -> dict[int, str]:
    """Number -> text of each line that is not blank, counted from one."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise GatelensError(f"{path} cannot be read: {error}.") from error
    return {number: line for number, line in enumerate(text.split("\n"), 1) if line.strip()}


def _good(
    path: str,
    lines: dict[int, str],
    parse: Callable[[dict[str, Any]], Item],
    fit: Callable[[list[Item]], tuple[list[Row | None], dict[int, str]]],
    skip_bad: bool,
    n: int | None,
    context: int | None,
) -> tuple[list[Item], list[Row]]:
    """The good lines as text and as tokens, the first n of them; bad ones are an error or a warning."""
    bad: dict[int, str] = {}
    items: dict[int, Item] = {}
    for number, line in lines.items():
        try:
            items[number] = parse(_object(line))
        except ValueError as problem:
            bad[number] = str(problem)
    rows, problems = fit(list(items.values()))
    numbers = list(items)
    bad |= {numbers[i]: problem for i, problem in problems.items()}
    good = []
    for number, row in zip(numbers, rows, strict=True):
        if row is not None and context is not None and len(row) > context:
            bad[number] = f"{len(row)} tokens, and the model reads {context}"
        elif row is not None:
            good.append((items[number], row))
    _report(path, len(lines), bad, skip_bad)
    return [item for item, _ in good[:n]], [row for _, row in good[:n]]


def _report(path: str, total: int, bad: dict[int, str], skip_bad: bool) -> None:
    if not bad:
        return
    count = f"{len(bad)} of {total} lines"
    if skip_bad and len(bad) < total:
        log.warning("%s: %s are bad and were left out.", path, count)
        return
    shown = "".join(f"\n  line {number}: {bad[number]}" for number in sorted(bad)[:SHOWN])
    more = f"\n  and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    advice = "mend them" if len(bad) == total else "mend them, or leave them out with skip_bad=True (--skip-bad)"
    raise GatelensError(f"{path}: {count} are bad, so nothing was run; {advice}.{shown}{more}")


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _is_response(lines: dict[int, str]) -> bool:
    """The first line that has a key of either kind says which kind of task it is."""
    for line in lines.values():
        try:
            keys = set(_object(line))
        except ValueError:
            continue
        if keys & {*CIRCUIT_KEYS, *RESPONSE_KEYS}:
            return bool(keys & set(RESPONSE_KEYS))
    return False


def _pair(value: dict[str, Any]) -> Pair:
    clean, corrupt = (_text(value, key, CIRCUIT_KEYS) for key in ("clean", "corrupt"))
    answers, wrong = (_texts(value, key) for key in ("answer", "wrong"))
    return Pair(clean, corrupt, answers, wrong)


def _item(value: dict[str, Any]) -> tuple[str, str]:
    prompt, response = (_text(value, key, RESPONSE_KEYS) for key in RESPONSE_KEYS)
    return prompt, response


def _text(value: dict[str, Any], key: str, keys: tuple[str, ...]) -> str:
    if key not in value:
        raise ValueError(f"no key {key!r}: a line has {', '.join(keys)}")
    text = value[key]
    if not isinstance(text, str) or not text:
        raise ValueError(f"{key!r} must be a string that is not empty")
    return text


def _texts(value: dict[str, Any], key: str) -> tuple[str, ...]:
    if not isinstance(value.get(key), list):
        return (_text(value, key, CIRCUIT_KEYS),)
    texts = value[key]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{key!r} must be a string or a list of strings that are not empty")
    return tuple(texts)


def _keys() -> str:
    return f"{', '.join(CIRCUIT_KEYS)} or with {', '.join(RESPONSE_KEYS)}"
