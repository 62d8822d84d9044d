"""What the command line runs: each job works in a folder and can be resumed."""
