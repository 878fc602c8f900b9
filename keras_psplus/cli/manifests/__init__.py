"""Manifests of Kubernetes."""
