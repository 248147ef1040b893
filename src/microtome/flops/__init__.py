"""What operators cost: formulas, and the conventions that say what is counted. Knows operators, not models."""

from microtome.flops.registry import OpCost, register_formula

__all__ = ["OpCost", "register_formula"]
