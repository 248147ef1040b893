"""The methods behind the numbers of the page, and the environment."""

from __future__ import annotations

from html import escape

from microtome.report.notes import FEW, profile_notes
from microtome.results.metrics import page_metrics, why_missing
from microtome.results.profile import Profile


def caveats(profile: Profile) -> list[str]:
    """Caveats for the headline figures."""
    coverage, found = profile.coverage, []
    if coverage.unknown:
        names = ", ".join(op.name for op in coverage.unknown[:4]) + (", …" if len(coverage.unknown) > 4 else "")
        found.append(f"Operators without a formula add nothing to MACs and FLOPs: {names}.")
    if coverage.never_ran:
        found.append(f"{len(coverage.never_ran)} modules never ran; what they hold counts in the call above them.")
    if profile.timing is not None and profile.timing.ratio > 1.05:
        found.append("Time stamps cost more than 5 %: short calls look longer than they are.")
    if profile.timing is not None and profile.timing.bare.count < FEW:
        found.append(
            f"Times are medians of {profile.timing.bare.count} passes, which are few: parts may exceed the whole."
        )
    if profile.energy is not None and profile.energy.whole is None:
        found.append("Energy is an estimate from given coefficients.")
    found += [f"No {name}: {why}." for name, why in profile.unavailable.items()]
    return found


def about(profile: Profile) -> str:
    """The environment, the methods, and the reasons why metrics are missing."""
    notes = "".join(f"<li>{escape(note)}</li>" for note in profile_notes(profile))
    missing = "".join(
        f"<li><b>{escape(metric.label)}</b>: {escape(why)}</li>"
        for metric in page_metrics()
        if (why := why_missing(profile, metric)) is not None
    )
    known = "".join(
        f"<li><b>{escape(metric.label)}</b>: {escape(metric.description)}</li>"
        for metric in page_metrics()
        if why_missing(profile, metric) is None
    )
    return (
        f"<h3>How each number was obtained</h3><ul>{notes}</ul>"
        f"<h3>What the columns are</h3><ul>{known}</ul>"
        + (f"<h3>What is not known, and why</h3><ul>{missing}</ul>" if missing else "")
        + f"<h3>Where it was measured</h3>{_environment(profile)}"
    )


def _environment(profile: Profile) -> str:
    if not profile.environment:
        return "<p>Nothing was measured: counts do not depend on a machine.</p>"
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in profile.environment.items())
    return f'<dl class="pairs">{rows}</dl>'
