"""A RayJob or RayCluster of KubeRay: its manifest and its settings."""
