"""How well each method finds circuits that are known: ``python -m bench.planted`` writes docs/planted.md."""
