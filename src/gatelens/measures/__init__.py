"""What is measured with gates: top-k circuits, curves, ablation, validity, and the files that hold the results."""
