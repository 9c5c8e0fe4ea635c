"""Charts, tables and pages about runs."""
