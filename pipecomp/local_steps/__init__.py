"""Local steps: replicas that average every few inner steps (DiLoCo)."""
