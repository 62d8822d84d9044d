"""What is measured of gates: top-k circuits, curves, ablation, validity, and the files they are saved in."""
