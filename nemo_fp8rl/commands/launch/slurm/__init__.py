"""A SLURM job: its script, and the programs that run on its nodes."""
