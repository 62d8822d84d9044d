"""Studies: a grid of models, tasks and settings in one TOML file, run cell by cell on one machine or a cluster.

``file`` reads the file, ``cells`` says what its cells are, ``folder`` keeps what became of them, ``work`` runs one
cell, ``run`` all of them here, ``ray_engine`` all of them on Ray, ``cost`` foretells time and memory.
"""
