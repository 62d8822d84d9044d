"""What a long job needs: its folder, atomic files, kept pieces, checkpoints, processes, settings and versions.

Nothing here knows about models or gates.
"""
