"""What a run leaves in its folder, and the page that shows it: see docs/report.md."""
