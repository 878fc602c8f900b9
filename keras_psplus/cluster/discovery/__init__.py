"""Discovery of a cluster from TF_CONFIG, Slurm, Kubernetes or the launcher."""
