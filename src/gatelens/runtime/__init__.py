"""What a long job needs: a run folder, atomic files, saved pieces, checkpoints, processes, settings and versions.

Nothing here knows about models or gates.
"""
