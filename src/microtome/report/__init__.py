"""Results as text, tables and files: pure functions, one file for each kind of result."""
