"""The power chip of a Raspberry Pi, with fake output of its command."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from microtome.devices.meters import (
    pi,
)
from microtome.errors import SensorFailed
from tests.devices.meters.machines import (
    PMIC,
    absent,
    only,
)


def test_the_power_chip_of_a_pi_is_summed_over_its_rails() -> None:
    source = only(pi.find(lambda: PMIC))
    # 0.1 A * 3.7 V + 0.2 A * 3.3 V + 2 A * 0.75 V; EXT5V and BATT have no current
    assert source.read().watts == pytest.approx(0.37 + 0.66 + 1.5)
    assert source.kind == "power"
    assert "without what does not go through it" in source.what


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a current from the power chip, got none"),
        ("EXT5V_V volt(24)=5.1V", "expected a current from the power chip, got none"),
        ("VDD_CORE_A current(7)=2.0A", "expected a voltage for each current .* none for VDD_CORE"),
        ('error=1 error_msg="Command not registered"', "expected a current or a voltage .* got 'error=1"),
        ("VDD_CORE_A current(7)=2.0V", "expected a current or a voltage"),
        ("VDD_CORE_A current(7)=two_A", "expected a number"),
        ("VDD_CORE_A current(7)=nanA", "of the power chip to be finite and at least 0, got nan"),
        ("VDD_CORE_A current(7)=-2A", "of the power chip to be finite and at least 0, got -2.0"),
    ],
)
def test_invalid_output_of_the_power_chip_raises(text: str, says: str) -> None:
    answers = iter([PMIC, text])
    source = pi.Pi(lambda: next(answers))
    with pytest.raises(SensorFailed, match=says):
        source.read()
    missing = absent(pi.find(lambda: text))
    assert "a Raspberry Pi 5" in missing.fix


def test_pi_without_its_command_reports_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pi, "COMMAND", ("no-such-command-anywhere",))
    missing = absent(pi.find())
    assert missing.reason == "there is no command vcgencmd: this is no Raspberry Pi"
    assert "raspi-utils" in missing.fix


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("import sys; sys.exit('VCHI initialization failed')", "vcgencmd ended with 1: VCHI initialization failed"),
        (f"print({PMIC!r})", ""),
    ],
)
def test_the_command_of_a_pi_is_run(monkeypatch: pytest.MonkeyPatch, script: str, says: str) -> None:
    monkeypatch.setattr(pi, "COMMAND", (sys.executable, "-c", script))
    if says:
        assert absent(pi.find()).reason == says
    else:
        assert only(pi.find()).read().watts == pytest.approx(2.53)


def test_a_hanging_command_of_a_pi_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*args: Any, **more: Any) -> None:
        raise subprocess.TimeoutExpired("vcgencmd", more["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    assert "vcgencmd cannot be run: TimeoutExpired" in absent(pi.find()).reason
