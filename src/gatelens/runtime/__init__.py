"""What a long job needs: atomic files, pieces that are kept, checkpoints, processes, precision and versions."""
