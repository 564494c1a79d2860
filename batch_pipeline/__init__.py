"""LLM batch inference that operators trust: the domain, which knows nothing of Dagster (definitions.py alone does)."""
