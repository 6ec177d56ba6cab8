"""Recording of a run's folder, and the page that shows it: see docs/report.md."""
