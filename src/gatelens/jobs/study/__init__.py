"""Studies: a grid of models, tasks and settings in one TOML file, run cell by cell on one machine or on a cluster.

``file`` reads the file and ``_grid`` expands its sections to ``_cells``; ``jobs`` says what a study can run, and
``chosen`` which cells a command runs. ``_work`` runs one cell, ``run`` all cells here and ``_ray_engine`` all cells on
Ray. ``_folder`` keeps the state of the cells, ``summary`` their results, and ``cost`` estimates time and memory.
"""
