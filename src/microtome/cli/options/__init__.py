"""Options that commands share, each declared once."""
