"""Overwinter: serverless inference for many models on few machines."""
