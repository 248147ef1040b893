"""Formulas for the costs of operators, and conventions of counting them; knows operators, not models."""

from microtome.flops.registry import OpCost, register_formula

__all__ = ["OpCost", "register_formula"]
