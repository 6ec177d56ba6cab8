"""What this project is measured by; `python -m benchmarks` lists it, README.md says what is where."""
