"""What operators cost: formulas, and the conventions that say what is counted. Knows operators, not models."""

from microtome.count.work import Work, register_formula

__all__ = ["Work", "register_formula"]
